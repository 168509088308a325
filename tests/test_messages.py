"""What users are told when something is wrong: the operator, the blob, what was found and what was wanted."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet.analysis import net_cost
from gpunet.blobs import aligned_bytes
from gpunet.cli import main
from gpunet.errors import (
    AllocationError,
    ArgumentError,
    BlobError,
    DataTypeError,
    DeviceError,
    NetError,
    SchemaError,
    ShapeError,
)
from gpunet.optimizers import SGD
from gpunet.proto import DeviceOption, NetDef
from gpunet.serialization import save
from gpunet.training.interrupts import Interrupts
from tests.nets import op


@pytest.fixture
def ws() -> gpunet.Workspace:
    found = gpunet.Workspace("cpu")
    found.feed("a", np.ones((2, 3), np.float32))
    found.feed("b", np.ones((2, 4), np.float32))
    found.feed("i", np.ones((2, 3), np.int64))
    return found


@pytest.mark.parametrize(
    ("definition", "error", "text"),
    [
        (
            op("Concat", "a b", "y s", axis=0),
            ShapeError,
            r"input X\[1\] \('b', float32 2x4\) does not fit input X\[0\] \('a', float32 2x3\)",
        ),
        (op("Concat", "a i", "y s", axis=0), DataTypeError, r"input X\[1\] \('i', int64 2x3\)"),
        (op("Sum", "a a b", "y"), ShapeError, r"\[2\] \('b', float32 2x4\)"),
        (op("Sum", "a gone", "y"), BlobError, r"input \w+\[1\]: .*'gone'"),
    ],
)
def test_one_of_many_inputs_is_named(ws, definition, error, text):
    with pytest.raises(error, match=text):
        ws.run_operator(definition)


HUGE = 1 << 30


@pytest.mark.parametrize("keep", [["y", "z"], ["z"]], ids=["blob", "arena"])
def test_an_allocation_that_fails_names_the_operator(ws, keep):
    ops = [op("ConstantFill", "", "y", shape=[HUGE, HUGE // 4]), op("ReduceBackMean", "y", "z")]
    ws.create(NetDef(name="n", op=ops), keep=keep, without=["constants"])
    output = r"output 'y' \(float32 1073741824x268435456\)"
    wanted = rf"\[ConstantFill\] op 0 'y' in net 'n': .*{output}.*: the host has no"
    with pytest.raises(AllocationError, match=wanted) as caught:
        ws.run("n")
    assert isinstance(caught.value, MemoryError)


def test_an_allocation_on_a_device_that_fails_names_the_operator():
    from gpunet.cuda_kernels.sim import toolchain

    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ws = gpunet.Workspace("sim:0")
    with pytest.raises(DeviceError, match=r"\[ConstantFill\] op 'y'.*: output 'y' .*: out of memory on sim"):
        ws.run_operator(op("ConstantFill", "", "y", shape=[HUGE, HUGE // 4]))


def test_memory_that_cannot_be_counted_is_refused():
    with pytest.raises(AllocationError, match=r"the host has no 9,223,372,036,854,775,807 bytes"):
        aligned_bytes(2**63 - 1)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (DeviceOption(device_type=99), r"device_type is 99, wanted one of 0 \(CPU\), 1 \(CUDA\), 2 \(MKL"),
        (DeviceOption(device_type=-1), "device_type is -1"),
        (DeviceOption(device_type=11), "device_type is 11"),
        (DeviceOption(device_type=1, device_id=-2), "device_id is -2, wanted 0 or more"),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["operator", "net", "dynamic operator"])
def test_devices_that_nothing_knows_are_refused(ws, option, text, place):
    net = NetDef(name="n", op=[op("NumpyTile" if place == "dynamic operator" else "Relu", "a", "y")])
    if place == "dynamic operator":
        net.op[0].input.append("i")
    (net if place == "net" else net.op[0]).device_option.CopyFrom(option)
    with pytest.raises(DeviceError, match=rf"\[\w+\] op 0 'y' in net 'n': {text}"):
        ws.create(net)


def test_all_types_that_do_not_exist_are_named_at_once(ws):
    net = NetDef(name="n", op=[op(kind, "a", "y") for kind in ("If", "Relu", "Print", "If")])
    wanted = r"net 'n': 3 of its 4 operators are of types that gpunet does not have: If, Print; gpunet\."
    for call in (
        lambda: ws.create(net),
        lambda: gpunet.infer(net, {"a": ((2, 3), "float32")}),
        lambda: net_cost(net, {}, {}),
    ):
        with pytest.raises(SchemaError, match=wanted):
            call()
    with pytest.raises(SchemaError, match=r"\[If\] op 0 'y' in net 'n': unknown operator type 'If'"):
        ws.create(NetDef(name="n", op=net.op[:1]))


@pytest.mark.parametrize("given", [None, 3, [None], ["x", 3], [b"x"]], ids=repr)
def test_what_is_no_name_of_a_blob_is_no_input(given):
    with pytest.raises(ArgumentError, match=r"\[Relu\] inputs are .*, wanted names of blobs"):
        gpunet.Net("n").add("Relu", given, "y")
    with pytest.raises(ArgumentError, match=r"\[Relu\] outputs are .*, wanted names of blobs"):
        gpunet.make_operator("Relu", "x", given)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (gpunet.Net("n"), "gpunet.net.Net"),
        (NetDef(), "gpunet.proto.gpunet_pb2.NetDef"),
        ({"type": "Relu"}, "dict"),
        ("Relu", "str"),
    ],
    ids=str,
)
def test_what_is_no_operator_does_not_run(ws, given, kind):
    with pytest.raises(NetError, match=f"found {kind} as an operator, wanted an OperatorDef of gpunet"):
        ws.run_operator(given)


def test_messages_of_another_program_are_told_from_those_of_gpunet(ws):
    """Caffe2's have the same names, and give their bytes."""
    foreign = type("NetDef", (), {"__module__": "caffe2.proto.caffe2_pb2"})()
    wanted = r"found caffe2\.proto\.caffe2_pb2\.NetDef as a net, wanted .* a NetDef of gpunet or its bytes"
    for run in (ws.run_once, ws.create, lambda net: gpunet.infer(net, {})):
        with pytest.raises(NetError, match=wanted):
            run(foreign)


@pytest.fixture
def cyclic() -> NetDef:
    ops = [op("Add", "x c", "a"), op("Relu", "a", "b"), op("Relu", "b", "c")]
    return NetDef(name="round", op=ops, external_input=["x"], external_output=["c"])


CYCLE = r"the operators form a cycle: Add 'a' -> Relu 'b' -> Relu 'c' -> Add 'a', wanted an order without one"


def test_a_cycle_is_named_wherever_a_net_is_read(ws, cyclic, tmp_path):
    save(tmp_path / "round.pbtxt", cyclic)
    with pytest.raises(NetError, match=CYCLE):
        ws.create(cyclic)
    with pytest.raises(NetError, match=CYCLE):
        gpunet.infer(cyclic, {"x": ((2,), "float32")})
    for command in ("info", "time", "explain", "check-races"):
        given = [command, str(tmp_path / "round.pbtxt"), "--input", "x=2x3"]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == 1, command
        assert "the operators form a cycle: Add 'a'" in " ".join(done.stderr.split()), command


def test_predict_does_not_rank_scores_that_are_no_numbers(tmp_path):
    model = gpunet.zoo.build("mlp", (1, 4, 4), 3)
    ws = gpunet.Workspace("cpu")
    ws.run_once(model.init_net)
    gpunet.save_model(tmp_path / "model", model, ws, "softmax")
    images = np.zeros((2, 1, 4, 4), np.float32)
    images[1, 0, 2, 2] = np.nan
    np.save(tmp_path / "i.npy", images)
    done = CliRunner().invoke(main, ["predict", str(tmp_path / "model"), str(tmp_path / "i.npy")])
    assert done.exit_code == 1
    assert "nan%" not in done.output
    assert "i.npy[0]: class" in done.stdout
    message = "i.npy[1]: 3 of 3 scores are NaN or infinite, wanted finite ones; so are 1 of 16 pixels"
    assert message in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_are_ignored_stay_ignored(number):
    """A shell starts `job &` and `nohup job` with signals ignored."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            assert signal.getsignal(number) is signal.SIG_IGN
            signal.raise_signal(number)
            assert interrupts.caught is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("run/checkpoints", "checkpoints is a file, wanted a folder"),
        ("run/steps.csv/", "steps.csv is a folder, wanted a file or nothing"),
        ("run/predict_net.pb/", "predict_net.pb is a folder"),
        ("run/curve.png/", "curve.png is a folder"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--overwrite"], ["--resume"]], ids=str)
def test_what_is_in_the_way_of_a_run_is_found_before_it_starts(tmp_path, monkeypatch, made, text, option):
    monkeypatch.setattr("gpunet.training.Trainer.run", lambda *_: pytest.fail("the run has started"))
    path = tmp_path / made
    if made.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    done = CliRunner().invoke(main, ["train", "mlp", "--out", str(tmp_path / "run"), *option])
    assert done.exit_code == 1, done.output
    assert text in " ".join(done.stderr.split())
    assert path.exists()


def test_a_folder_that_cannot_be_written_to_is_found_before_a_run_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    done = CliRunner().invoke(main, ["train", "mlp", "--out", str(tmp_path / "new" / "run")])
    assert done.exit_code == 1
    assert f"{tmp_path} cannot be written to" in "".join(done.stderr.splitlines())


def layer(build):
    """What ``build`` does to a model with images as its input."""
    model = gpunet.Model("m")
    return build(model, model.input("x", (4, 1, 8, 8)))


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (
            lambda m, x: m.conv(x, "c", "8", 3),
            ArgumentError,
            "layer 'c': channels is '8', wanted a whole num",
        ),
        (lambda m, x: m.conv(x, "c", 8, 2.5), ArgumentError, r"layer 'c': kernel is 2\.5, wanted a whole"),
        (
            lambda m, x: m.conv(x, "c", 8, (3, 0)),
            ArgumentError,
            "layer 'c': kernel is 0, wanted .*, 1 or more",
        ),
        (lambda m, x: m.conv(x, "c", -8, 3), ArgumentError, "layer 'c': channels is -8"),
        (lambda m, x: m.conv(x, "c", 8, 3, group=0), ArgumentError, "layer 'c': group is 0"),
        (lambda m, x: m.conv(x, "c", 8, 3, stride=0), ArgumentError, "layer 'c': stride is 0"),
        (lambda m, x: m.conv(x, "c", 8, 3, dilation=None), ArgumentError, "layer 'c': dilation is None"),
        (
            lambda m, x: m.conv_transpose(x, "c", 8, 3, adj=-1),
            ArgumentError,
            "adj is -1, wanted .*, 0 or more",
        ),
        (
            lambda m, x: m.conv(x, "c", 8, (3, 3, 3)),
            ShapeError,
            r"layer 'c': kernel \[3, 3, 3\] has 3 numbers",
        ),
        (lambda m, x: m.max_pool(x, "p", "2"), ArgumentError, "layer 'p': kernel is '2'"),
        (lambda m, x: m.fc(x, "f", True), ArgumentError, "layer 'f': units is True"),
        (
            lambda m, x: m.input("y", 3),
            ShapeError,
            "input 'y' of model 'm' has shape 3, wanted whole numbers",
        ),
        (lambda m, x: m.input("y", (None, 3)), ShapeError, r"has shape \(None, 3\), wanted whole numbers"),
        (lambda m, x: m.input("y", (-1, 3)), ShapeError, r"has shape \(-1, 3\)"),
        (lambda m, x: m.input("x", (2, 3)), NetError, "model 'm' has a blob 'x' already"),
        (lambda m, x: SGD("0.1"), ArgumentError, r"SGD: learning_rate is '0\.1', wanted a number"),
        (lambda m, x: SGD(0.1, momentum=None), ArgumentError, "SGD: momentum is None, wanted a number"),
        (lambda m, x: SGD(0.1, clip_norm="1"), ArgumentError, "SGD: clip_norm is '1', wanted a number"),
        (lambda m, x: gpunet.Workspace("cpu", seed="1"), ArgumentError, "seed is '1', wanted a whole number"),
        (
            lambda m, x: gpunet.Workspace("cpu", seed=0.5),
            ArgumentError,
            r"seed is 0\.5, wanted a whole number",
        ),
        (lambda m, x: gpunet.Net(3), NetError, "a net is to be named 3, wanted a text"),
        (lambda m, x: gpunet.make_operator(3), ArgumentError, "type of an operator is 3, wanted a text"),
    ],
)
def test_values_that_make_no_sense_are_named(build, error, text):
    with pytest.raises(error, match=text):
        layer(build)


def test_numbers_of_numpy_are_numbers():
    workspace = gpunet.Workspace("cpu", seed=np.int64(3))
    layer(lambda m, x: m.conv(x, "c", np.int64(8), [np.int32(3), 3], stride=np.int8(1)))
    assert (workspace.seed, SGD(np.float32(0.5)).learning_rate) == (3, 0.5)


def test_predictors_say_what_they_were_given(tmp_path):
    model = gpunet.Model("m")
    y = model.relu(model.input("x", (2, 3)), "y")
    workspace = gpunet.Workspace("cpu")
    gpunet.save_model(tmp_path, model, workspace, y)
    predictor = gpunet.Predictor(tmp_path, "cpu")
    with pytest.raises(
        BlobError, match=r"found an array \(1, 2, 3\), wanted a list of arrays, one for each of x"
    ):
        predictor.run(np.ones((1, 2, 3), np.float32))
    with pytest.raises(DataTypeError, match="input 'x' is no array of float32: could not convert"):
        predictor.run({"x": "text"})

"""Saved models: what is written gives the same results again, and what Caffe2 exported is understood."""

import json

import numpy as np
import pytest

import gpunet
from gpunet.analysis import net_cost
from gpunet.definitions import make_operator
from gpunet.dtypes import bfloat16
from gpunet.errors import BlobError, DataTypeError, FormatError, NetError
from gpunet.export import Predictor, given_fill, load_model, save_model
from gpunet.proto import NetDef
from gpunet.serialization import save
from gpunet.specs import spec
from gpunet.zoo import build

IMAGES = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)


def trained(name="resnet20", classes=4):
    model = build(name, (1, 8, 8), classes)
    ws = gpunet.Workspace("cpu", seed=3)
    ws.run_once(model.init_net)
    ws.feed("data", IMAGES)
    ws.feed("label", np.zeros(len(IMAGES), np.int32))
    ws.run_once(model.net)
    return model, ws


@pytest.fixture
def saved(tmp_path):
    model, ws = trained()
    save_model(tmp_path, model, ws, "softmax")
    ws.run_once(model.predict_net("softmax"))
    return tmp_path, ws.fetch("softmax")


def test_a_loaded_model_gives_the_same_bits(saved):
    folder, expected = saved
    model = load_model(folder)
    assert (model.inputs, model.outputs) == (["data"], ["softmax"])
    assert model.value_info == {"data": spec((1, 1, 8, 8), "float32")}
    for found in (Predictor(model).run({"data": IMAGES}), Predictor(folder, "cpu").run([IMAGES])):
        assert list(found) == ["softmax"]
        assert found["softmax"].tobytes() == expected.tobytes()


def test_files_and_their_text(tmp_path):
    folder = tmp_path
    model, ws = trained("mlp")
    save_model(folder, model, ws, "softmax")
    ws.run_once(model.predict_net("softmax"))
    expected = ws.fetch("softmax")
    assert sorted(p.name for p in folder.iterdir()) == [
        "init_net.pb",
        "init_net.pbtxt",
        "predict_net.pb",
        "predict_net.pbtxt",
        "value_info.json",
    ]
    assert json.loads((folder / "value_info.json").read_text()) == {"data": [1, [1, 1, 8, 8]]}
    for name in ("init_net.pb", "predict_net.pb"):
        (folder / name).unlink()
    for path in (folder, folder / "predict_net.pbtxt"):
        assert Predictor(path).run([IMAGES])["softmax"].tobytes() == expected.tobytes()


def test_large_parameters_are_not_written_as_text(tmp_path, monkeypatch):
    model, ws = trained("mlp")
    save_model(tmp_path, model, ws, "softmax")
    assert (tmp_path / "init_net.pbtxt").exists()
    monkeypatch.setattr("gpunet.export.MAX_TEXT_PARAMETER_BYTES", 1000)
    save_model(tmp_path, model, ws, "softmax")
    assert not (tmp_path / "init_net.pbtxt").exists()


def test_only_what_the_outputs_need_is_saved(tmp_path):
    model, ws = trained("mlp")
    loaded = save_model(tmp_path, model, ws, ["fc1"])
    assert list(loaded.init_net.external_output) == ["fc1_w", "fc1_b"]
    assert len(loaded.predict_net.op) == 2  # FC, and Relu in place


@pytest.mark.parametrize(
    "value",
    [
        np.float32([[1.5, np.inf], [-0.0, 1e-45]]),
        np.float16([1.5, 65504]),
        np.array([1.5, 3e38, -(2.0**-130)]).astype(bfloat16()),
        np.float64([0.5]),
        np.int64([2**40]),
        np.int32([-5]),
        np.int16([7]),
        np.uint8([0, 255]),
        np.array([True, False]),
        np.array([b"x", b"\xff"], dtype=object),
        np.float32(2),
        np.empty((0, 3), np.float32),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}",
)
def test_fills_of_every_type(value):
    ws = gpunet.Workspace("cpu")
    ws.run_operator(given_fill("x", np.asarray(value)))
    found = ws.fetch("x")
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tolist() == value.tolist()


def test_what_cannot_be_filled():
    with pytest.raises(DataTypeError, match="blob 'x' is uint16"):
        given_fill("x", np.uint16([1]))
    with pytest.raises(DataTypeError, match="blob 'x' is bytes, wanted a tensor"):
        given_fill("x", b"abc")


# ---- pairs that Caffe2 exported


def exported(folder, *, placeholder=True, declared=True):
    """An init net and a predict net as Caffe2's mobile exporter writes them."""
    init, predict = NetDef(name="init"), NetDef(name="net")
    init.op.append(given_fill("w", np.float32([[1, 2], [3, 4], [5, 6]])))
    init.op.append(make_operator("ConstantFill", [], ["b"], shape=[3], value=1.0))
    if placeholder:
        init.op.append(make_operator("GivenTensorFill", [], ["data"], shape=[1, 1], values=[0.0]))
    predict.op.append(make_operator("FC", ["data", "w", "b"], ["y"]))
    predict.external_input.extend(["data", "w", "b"])
    if declared:
        predict.external_output.append("y")
    save(folder / "init_net.pb", init)
    save(folder / "predict_net.pb", predict)
    return folder


@pytest.mark.parametrize("placeholder", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_an_exported_pair(tmp_path, placeholder, declared):
    predictor = Predictor(exported(tmp_path, placeholder=placeholder, declared=declared))
    assert predictor.model.inputs == ["data"]
    assert predictor.run([[[1, 1], [0, 2]]])["y"].tolist() == [[4, 8, 12], [5, 9, 13]]


def test_a_parameter_of_one_zero_is_no_placeholder(tmp_path):
    init, predict = NetDef(name="init"), NetDef(name="net")
    init.op.append(given_fill("w", np.float32([[3]])))
    init.op.append(given_fill("b", np.float32([0])))
    predict.op.append(make_operator("FC", ["data", "w", "b"], ["y"]))
    predict.external_input.extend(["data", "w", "b"])
    save(tmp_path / "init_net.pb", init)
    save(tmp_path / "predict_net.pb", predict)
    assert load_model(tmp_path).inputs == ["data"]


def test_files_of_other_names(tmp_path):
    exported(tmp_path)
    (tmp_path / "predict_net.pb").rename(tmp_path / "squeeze_predict_net.pb")
    (tmp_path / "init_net.pb").rename(tmp_path / "squeeze_init_net.pb")
    assert load_model(tmp_path / "squeeze_predict_net.pb").inputs == ["data"]
    (tmp_path / "squeeze_init_net.pb").rename(tmp_path / "weights.pb")
    with pytest.raises(FileNotFoundError, match="the init net is missing beside the predict net"):
        load_model(tmp_path / "squeeze_predict_net.pb")
    assert load_model(tmp_path / "squeeze_predict_net.pb", init_net=tmp_path / "weights.pb").inputs == [
        "data"
    ]
    (tmp_path / "squeeze_predict_net.pb").rename(tmp_path / "net.pb")
    with pytest.raises(FormatError, match="name does not tell where the init net is"):
        load_model(tmp_path / "net.pb")
    assert len(load_model(tmp_path / "net.pb", parameters=False).predict_net.op) == 1


def test_what_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such model"):
        load_model(tmp_path / "none")
    with pytest.raises(
        FileNotFoundError, match=r"the folder holds no saved model, wanted predict_net\.pb or"
    ):
        load_model(tmp_path)
    exported(tmp_path)
    with pytest.raises(FormatError, match="wanted a NetDef of at most 10 bytes"):
        load_model(tmp_path, limit=10)
    (tmp_path / "value_info.json").write_text('{"data": [1, [-1, 2]]}')
    with pytest.raises(FormatError, match=r"value_info\.json: malformed \(sizes \[-1, 2\]\)"):
        load_model(tmp_path)
    (tmp_path / "value_info.json").write_text("[1")
    with pytest.raises(FormatError, match=r"value_info\.json: malformed"):
        load_model(tmp_path)
    (tmp_path / "value_info.json").unlink()
    (tmp_path / "init_net.pb").write_bytes(b"\xff" * 100)
    with pytest.raises(FormatError, match="are not a NetDef"):
        load_model(tmp_path)
    save(tmp_path / "predict_net.pb", NetDef(name="empty"))
    with pytest.raises(FormatError, match="has no operators"):
        load_model(tmp_path)


def test_wrong_inputs_are_named(saved):
    predictor = Predictor(saved[0])
    with pytest.raises(BlobError, match="2 inputs, wanted 1: data"):
        predictor.run([IMAGES, IMAGES])
    with pytest.raises(BlobError, match="inputs none, wanted data: 'data' is missing"):
        predictor.run({})
    with pytest.raises(BlobError, match="'x' is not an input of the model"):
        predictor.run({"data": IMAGES, "x": IMAGES})


def test_a_declared_output_that_nothing_makes(tmp_path):
    exported(tmp_path)
    model = load_model(tmp_path)
    model.predict_net.external_output.append("z")
    with pytest.raises(NetError, match="no operator makes the output z"):
        Predictor(model)


# ---- cost


def test_cost_of_a_chain():
    net = gpunet.Net("chain")
    net.add("FC", ["x", "w", "b"], ["h"])  # 2x3 -> 2x5
    net.add("Relu", ["h"], ["h"])
    net.add("FC", ["h", "v", "c"], ["y"])  # -> 2x4
    net.add("Softmax", ["y"], ["p"])
    net.add_external_output("p")
    parameters = {"w": (5, 3), "b": (5,), "v": (4, 5), "c": (4,)}
    cost = net_cost(
        net, {"x": spec((2, 3), "float32")}, {n: spec(s, "float32") for n, s in parameters.items()}
    )
    assert cost.parameter_count == 15 + 5 + 20 + 4
    assert cost.parameter_bytes == 4 * 44
    # Most is live while the second FC runs: h (2x5) and y (2x4). Before it are x (2x3) and h, then y and p.
    assert cost.peak_bytes == 4 * (44 + 10 + 8)
    assert [str(c.outputs[0]) for c in cost.operators] == ["float32 2x5"] * 2 + ["float32 2x4"] * 2
    assert cost.flops == sum(c.flops for c in cost.operators)
    assert cost.operators[0].flops >= 2 * 2 * 3 * 5


def test_cost_where_shapes_are_not_known():
    net = gpunet.Net("chain")
    net.add("FC", ["x", "w", "b"], ["h"])
    cost = net_cost(net, {"x": spec((2, 3), "float32")}, {})
    assert (cost.flops, cost.peak_bytes, cost.operators[0].outputs) == (None, None, (None,))


def test_names_at_the_top_are_these():
    assert (gpunet.load_model, gpunet.save_model, gpunet.Predictor) == (load_model, save_model, Predictor)
    with pytest.raises(AttributeError, match="has no attribute 'load_modell'"):
        _ = gpunet.load_modell

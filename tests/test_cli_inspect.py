"""The commands that look at a net: time, explain, draw, check-races, and --detect-nan."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet import profiler
from gpunet.cli import main
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.passes.pipeline import PASSES
from gpunet.profiler import Peak
from gpunet.proto import NetDef
from gpunet.races import Access, Race, Record
from gpunet.serialization import save
from tests.sim_kernels import needs_compiler


def invoke(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.fixture(autouse=True)
def _known_peak(monkeypatch):
    """The machine is not measured in tests."""
    monkeypatch.setattr(profiler, "peak", lambda device: Peak(flops=1e12, bytes=1e11))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = gpunet.zoo.build("mlp", (1, 4, 4), 3)
    ws = gpunet.Workspace("cpu")
    ws.run_once(model.init_net)
    gpunet.save_model(folder, model, ws, "softmax")
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A net alone in a file: branches that need no parameters."""
    path = tmp_path_factory.mktemp("net") / "branches.pbtxt"
    ops = [make_operator("Softmax", ["x"], [f"a{b}"], axis=1) for b in range(2)]
    ops.append(make_operator("LabelCrossEntropy", ["a0", "i"], ["l"]))
    ops.append(make_operator("Sum", ["a0", "a1"], ["y"]))
    net = NetDef(name="branches", op=ops, external_input=["x", "i"], external_output=["y", "l"])
    save(path, net)
    return path


def test_time_of_a_saved_model(saved, tmp_path):
    shown = invoke(
        "time", saved, "--device", "cpu", "--iterations", 3, "--batch-size", 5, "--sort", "order",
        "--trace", tmp_path / "t.json", "--memory", tmp_path / "m.png",
    ).stdout  # fmt: skip
    for text in ("FC", "Softmax", "5x3", "cpu lane 0", "GFLOP/s", "roofline", "by type", "3 runs", "on cpu"):
        assert text in shown
    rows = [line.split()[1] for line in shown.splitlines() if "cpu lane 0" in line]
    net = gpunet.load_model(saved).predict_net
    assert rows == [op.type for op in net.op] or "Fused" in " ".join(rows)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert len([e for e in events if e.get("cat") == "run"]) == 3
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_time_of_training_with_lanes():
    shown = invoke(
        "time", "zoo:mlp", "--device", "cpu", "--iterations", 1, "--engine", "dag", "--workers", 2
    ).stdout
    assert "engine async_scheduling" in shown
    assert "MomentumSGDUpdate" in shown


def test_a_net_alone_needs_shapes(file):
    shown = invoke("check-races", file, "--device", "cpu", "--input", "x=4x3", code=2).stderr
    assert "the shape of input 'i' is not known, wanted --input i=SHAPE" in shown
    given = ["--input", "x=4x3", "--input", "i=4:int32", "--device", "cpu"]
    shown = invoke("explain", file, *given, "--pass", "inference").stdout
    assert "1 Softmax on cpu: x float32 4x3 -> a1 float32 4x3" in shown
    assert "2 LabelCrossEntropy on cpu: a0 float32 4x3, i int32 4 -> l float32 4" in shown
    assert "4 runs" in invoke("time", file, *given, "--iterations", 4).stdout


def test_where_parameters_are_missing_the_message_tells_of_the_init_net(saved, tmp_path):
    net = tmp_path / "net.pb"
    net.write_bytes((saved / "predict_net.pb").read_bytes())
    given = ["time", net, "--device", "cpu", "--iterations", 1, "--input", "data=2x1x4x4"]
    shown = " ".join(invoke(*given, code=2).stderr.split())
    assert "is not known, nor are those of" in shown
    assert "(the file's name does not tell where its init net is, --init-net does)" in shown
    assert "1 run" in invoke(*given, "--init-net", saved / "init_net.pb").stdout
    refused = invoke("draw", "zoo:mlp", "--init-net", net, "--out", "x.svg", code=2).stderr
    assert "zoo:mlp makes its own parameters" in refused


def test_explain_shows_every_pass(file):
    given = ["--input", "x=4x3", "--input", "i=4:int32", "--device", "cpu", "--engine", "dag", "--workers", 2]
    shown = invoke("explain", file, *given).stdout
    names = [line[3:] for line in shown.splitlines() if line.startswith("== ")]
    assert names == ["inference", *(p.name for p in PASSES), "schedule", "memory_plan"]
    sections = dict(part.split("\n", 1) for part in shown.split("== ")[1:])
    assert sections["inference"].count("Softmax") == 2
    assert sections["common_subexpressions"].count("Softmax") == 1
    assert sections["copies"].strip() == "(no change)"
    assert "waits" in sections["schedule"]
    assert "cpu lane" in sections["schedule"]
    assert "blob y" in sections["memory_plan"]
    assert "arena at 0" in sections["memory_plan"]
    assert "lower bound" in sections["memory_plan"]
    assert "unplanned" in sections["memory_plan"]


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_explain_prints_sources(tmp_path, device):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ops = []
    for name in "ab":
        ops.append(make_operator("Tanh", ["x"], [f"{name}t"]))
        ops.append(make_operator("Sqr", [f"{name}t"], [name]))
    ops[2].type = "Sigmoid"
    ops.append(make_operator("SumElements", ["b"], ["s"], average=1))
    net = NetDef(name="n", op=ops, external_input=["x"], external_output=["a", "b", "s"])
    save(tmp_path / "n.pbtxt", net)
    given = [tmp_path / "n.pbtxt", "--input", "x=512x512", "--device", device]
    shown = invoke("explain", *given, "--sources").stdout
    assert shown.count('extern "C" __global__ void fused_') == 2
    assert "// [FusedElementwise] op 1 'a = Sqr(Tanh(x))' in net 'n'" in shown
    assert "no operators are fused" in invoke("explain", *given, "--without", "fusion", "--sources").stdout
    assert "exclude each other" in invoke("explain", *given, "--sources", "--pass", "fusion", code=2).stderr


def test_explain_without_a_pass(file):
    given = ["--input", "x=4x3", "--input", "i=4:int32", "--device", "cpu"]
    shown = invoke("explain", file, *given, "--without", "common_subexpressions").stdout
    assert "== common_subexpressions" not in shown
    assert invoke("explain", file, *given, "--pass", "schedule").stdout.count("Softmax") == 1
    shown = invoke("explain", file, *given, "--pass", "dead_code", "--without", "dead_code", code=1).stderr
    assert "pass 'dead_code' did not run" in shown
    shown = invoke("explain", file, *given, "--pass", "nope", code=1).stderr
    assert "there is no pass 'nope', wanted one of inference, dead_code" in shown
    assert (
        "cannot switch off pass 'nope'" in invoke("explain", file, *given, "--without", "nope", code=1).stderr
    )


def test_explain_of_a_net_with_a_dynamic_operator(tmp_path):
    ops = [
        make_operator("Relu", ["x"], ["a"]),
        make_operator("NumpyTile", ["a", "r"], ["t"]),
        make_operator("Tanh", ["t"], ["y"]),
    ]
    save(tmp_path / "n.pb", NetDef(name="n", op=ops, external_input=["x", "r"], external_output=["y"]))
    given = [tmp_path / "n.pb", "--input", "x=4x3", "--input", "r=2:int32", "--device", "cpu"]
    shown = invoke("explain", *given).stdout
    assert shown.count("== inference") == 2
    first, second = shown.split("== dynamic operator [NumpyTile] op 1 't' in net 'n'\n")
    assert "Relu on cpu: x float32 4x3 -> a float32 4x3" in first
    assert "Tanh on cpu: t float32 " in second
    assert "(no operators)" not in shown
    assert "2 steps in 1 lane, 0 waits: no two touch" in invoke("check-races", *given).stdout


@pytest.mark.parametrize("ending", ["svg", "dot"])
def test_draw(saved, tmp_path, ending):
    path = tmp_path / f"net.{ending}"
    shown = invoke("draw", saved, "--device", "cpu", "--out", path).stdout
    assert shown.startswith(f"{path}: ")
    assert "in 1 lane" in shown
    assert path.read_text().startswith("<svg" if ending == "svg" else "digraph")
    assert "Softmax" in path.read_text()


def test_draw_wants_a_known_ending(saved, tmp_path):
    shown = invoke("draw", saved, "--out", tmp_path / "net.png", code=2).stderr
    assert "wanted a name that ends in .svg or .dot" in shown


def test_check_races_proves_or_lists(monkeypatch):
    given = [
        "zoo:lenet",
        "--device",
        "cpu",
        "--engine",
        "async_scheduling",
        "--workers",
        3,
        "--batch-size",
        2,
    ]
    shown = invoke("check-races", *given).stdout
    assert "steps in 3 lanes" in shown
    assert shown.endswith("waits: no two touch the same bytes in no fixed order\n")
    accesses = [Access("cpu", 0, 8, True, name) for name in "ab"]
    records = [Record(f"lane {i}", f"op {i}", (), (access,)) for i, access in enumerate(accesses)]
    race = Race(*records, *accesses)
    monkeypatch.setattr("gpunet.records.check_races", lambda program: [race])
    shown = invoke("check-races", *given, code=1).stdout
    assert "op 0 (lane 0) writes 'a' and op 1 (lane 1) writes 'b': bytes 0 to 8 of cpu" in shown
    assert shown.endswith(": 1 race\n")


def test_check_races_on_streams():
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    given = ["--device", "sim:0", "--engine", "async_scheduling", "--streams", 3, "--workers", 2]
    assert "no two touch" in invoke("check-races", "zoo:mlp", *given).stdout


def test_detect_nan_on_every_command_that_runs_a_net(tmp_path):
    ops = [make_operator("Log", ["data"], ["l"]), make_operator("Softmax", ["l"], ["y"], axis=1)]
    net = NetDef(name="n", op=ops, external_input=["data"], external_output=["y"])
    save(tmp_path / "predict_net.pb", net)
    save(tmp_path / "init_net.pb", NetDef(name="i"))
    np.save(tmp_path / "x.npy", np.zeros((1, 1, 2, 2), np.float32))
    arguments = ["predict", tmp_path, tmp_path / "x.npy", "--device", "cpu"]
    assert "scores are NaN or infinite" in invoke(*arguments, code=1).stderr
    assert (
        "error: [Log] op 0 'l' in net 'n': output Y 'l'" in invoke(*arguments, "--detect-nan", code=1).stderr
    )
    arguments = ["time", tmp_path, "--input", "data=2x3", "--device", "cpu", "--iterations", 1]
    assert "1 runs" in invoke(*arguments, "--detect-nan").stdout
    arguments = [
        "train", "mlp", "--epochs", 1, "--learning-rate", 1e30, "--device", "cpu", "--out", tmp_path / "run",
    ]  # fmt: skip
    assert "the loss is" in invoke(*arguments, code=1).stderr
    shown = invoke(*arguments, "--overwrite", "--detect-nan", code=1).stderr
    assert "that are not finite" in shown
    assert "error: [" in shown


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("time", ["--iterations", 1]),
        ("explain", []),
        ("draw", ["--out", "{}/n.svg"]),
        ("check-races", []),
        pytest.param("check-races", ["--recorded"], marks=needs_compiler),
    ],
)
def test_detect_nan_where_a_command_runs_a_part_of_a_net(tmp_path, command, options):
    """What comes before an operator whose shapes depend on data has to run to know what comes behind it."""
    ops = [
        make_operator("Sub", ["x", "x"], ["zero"]),
        make_operator("Log", ["zero"], ["l"]),
        make_operator("NumpyTile", ["l", "r"], ["t"]),
        make_operator("Tanh", ["t"], ["y"]),
    ]
    save(tmp_path / "n.pb", NetDef(name="n", op=ops, external_input=["x", "r"], external_output=["y"]))
    given = [command, tmp_path / "n.pb", "--input", "x=4x3", "--input", "r=2:int32"]
    given += ["--without", "fusion", "--device", "sim:0" if "--recorded" in options else "cpu"]
    given += [str(option).format(tmp_path) for option in options]
    invoke(*given)
    shown = invoke(*given, "--detect-nan", code=1).stderr
    assert "error: [Log] op 1 'l' in net 'n': output Y 'l' (float32 4x3) has 12 of 12 elements" in shown


def test_no_nan_is_looked_for_in_a_recorded_run():
    """And what was copied to look for it is no part of what is recorded."""
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    given = ["check-races", "zoo:mlp", "--batch-size", 2, "--recorded", "--runs", 1]
    pieces = [int(invoke(*given, *more).stdout.split()[0]) for more in ([], ["--detect-nan"])]
    # Its second run has the fed blobs on the device already.
    assert pieces[1] <= pieces[0]


@pytest.mark.parametrize("command", ["info", "time", "explain", "draw", "check-races"])
def test_commands_take_nets_in_the_same_ways(saved, file, tmp_path, command):
    options = [] if command == "info" else ["--device", "cpu"]
    options += ["--out", tmp_path / "n.svg"] if command == "draw" else []
    invoke(command, "zoo:mlp", "--batch-size", 2, *options)
    invoke(command, saved, "--input", "data=3x1x4x4", *options)
    invoke(command, file, "--input", "x=4x3", "--input", "i=4:int32", *options)


def test_info_of_a_model_of_the_zoo():
    shown = " ".join(invoke("info", "zoo:mlp", "--batch-size", 2).stdout.split())
    assert "inputs: data (float32 2x1x8x8), label (int32 2)" in shown
    assert "outputs: loss, accuracy" in shown
    assert "MomentumSGDUpdate" in shown


def test_info_of_a_net_alone_knows_what_it_is_told(file):
    shown = " ".join(invoke("info", file, "--input", "x=4x3").stdout.split())
    assert "inputs: x (float32 4x3), i outputs: y, l" in shown
    assert "peak memory: not known without the shapes" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["zoo:mlp", "--keep", "lost"], 1, "net 'mlp' cannot keep 'lost': none of its operators reads or"),
        (["zoo:lenett"], 1, "there is no model 'lenett'"),
        (["nowhere"], 1, "there is no such model"),
        (["zoo:mlp", "--input", "data=ax2"], 2, "wanted NAME=SHAPE like data=1x3x224x224"),
        (["zoo:mlp", "--input", "nope=2"], 2, "no input 'nope', wanted one of data, label"),
        (["zoo:mlp", "--input", "data=2x1x8x8:float99"], 2, "float99"),
        (["zoo:mlp", "--engine", "fast"], 1, "has type 'fast', wanted one of"),
    ],
)
def test_mistakes_are_one_line(arguments, code, text):
    shown = invoke("check-races", *arguments, code=code).stderr
    assert text in shown
    assert "Traceback" not in shown

"""What a compiled net does when shapes, blobs and definitions change or are wrong."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet.errors import (
    ArgumentError,
    BlobError,
    DataTypeError,
    GpunetError,
    KernelError,
    NetError,
    SchemaError,
    ShapeError,
)
from gpunet.observers import observe
from gpunet.proto import PROTO_CPU, NetDef
from tests.nets import op
from tests.sim_kernels import needs_compiler


@pytest.fixture
def ws() -> gpunet.Workspace:
    return gpunet.Workspace("cpu")


def test_shapes_may_change_between_runs(ws):
    ws.feed("x", np.ones((2, 3), dtype=np.float32))
    ws.create(NetDef(name="n", op=[op("Relu", "x", "y"), op("Sigmoid", "y", "z")]))
    for shape in [(2, 3), (5, 3), (1, 1), (0, 7), (2, 3)]:
        x = np.full(shape, 2, dtype=np.float32)
        ws.feed("x", x)
        ws.run("n")
        np.testing.assert_allclose(ws.fetch("z"), 1 / (1 + np.exp(-x)), rtol=1e-6)


def test_types_may_change_between_runs(ws):
    ws.create(NetDef(name="n", op=[op("Relu", "x", "y")]))
    for dtype in (np.float32, np.float64, np.float16, np.float32):
        ws.feed("x", np.array([-1, 1], dtype=dtype))
        ws.run("n")
        assert ws.fetch("y").dtype == dtype


def test_buffers_stay_while_shapes_do(ws):
    ws.feed("x", np.ones((2, 3), dtype=np.float32))
    ws.create(NetDef(name="n", op=[op("Relu", "x", "y")]))
    ws.run("n")
    epoch, buffer = ws.epoch, ws.value("y")
    ws.feed("x", np.zeros((2, 3), dtype=np.float32))
    ws.run("n", 5)
    assert ws.epoch == epoch
    assert ws.value("y") is buffer


def test_smaller_batches_reuse_the_memory_of_larger_ones(ws):
    ws.create(NetDef(name="n", op=[op("Relu", "x", "y")]))
    ws.feed("x", np.ones((8, 3), dtype=np.float32))
    ws.run("n")
    memory = ws.value("y").ctypes.data
    ws.feed("x", np.ones((5, 3), dtype=np.float32))
    ws.run("n")
    assert ws.value("y").ctypes.data == memory


def test_two_nets_share_blobs(ws):
    ws.create(NetDef(name="a", op=[op("Relu", "x", "y")]))
    ws.create(NetDef(name="b", op=[op("Sigmoid", "x", "y")]))
    for shape in [(2,), (3,)]:
        ws.feed("x", np.zeros(shape, dtype=np.float32))
        ws.run("a")
        assert ws.fetch("y").tolist() == [0] * shape[0]
        ws.run("b")
        assert ws.fetch("y").tolist() == [0.5] * shape[0]


def test_in_place(ws):
    ws.feed("x", np.array([-1, 4], dtype=np.float32))
    ws.create(NetDef(name="n", op=[op("Relu", "x", "x"), op("Sum", "x x", "x")]))
    ws.run("n")
    assert ws.fetch("x").tolist() == [0, 8]
    ws.run("n")
    assert ws.fetch("x").tolist() == [0, 16]


def test_in_place_reshape_starts_from_the_new_shape_next_time(ws):
    ws.feed("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    ws.create(NetDef(name="n", op=[op("Reshape", "x", "x old", shape=[-1, 2])]))
    ws.run("n")
    assert ws.fetch("x").shape == (3, 2)
    assert ws.fetch("old").tolist() == [2, 3]
    ws.run("n")
    assert ws.fetch("old").tolist() == [3, 2]
    np.testing.assert_array_equal(ws.fetch("x").ravel(), np.arange(6))


def test_a_blob_that_changes_its_shape_keeps_its_value_until_a_run_has_ended(ws):
    """It is read, and then made again with more elements."""
    x = np.arange(4, dtype=np.float32)
    ws.feed("x", x)
    ws.feed("bad", np.array([3], np.int32))
    ops = [
        op("Sqr", "x", "h"),
        op("LabelCrossEntropy", "p bad", "l"),
        op("Concat", "h h", "x parts", axis=0),
        op("Scale", "x", "y", scale=2.0),
    ]
    ws.feed("p", np.ones((1, 2), np.float32))
    ws.create(NetDef(name="n", op=ops))
    for _ in range(2):
        with pytest.raises(KernelError, match="label 0 is 3"):
            ws.run("n")
        np.testing.assert_array_equal(ws.fetch("x"), x)
    ws.program("n").prepare()
    np.testing.assert_array_equal(ws.fetch("x"), x)
    ws.feed("bad", np.array([1], np.int32))
    for size in (8, 16):
        x = np.concatenate([x**2] * 2)
        ws.run("n")
        assert x.size == size
        np.testing.assert_array_equal(ws.fetch("x"), x)
        np.testing.assert_array_equal(ws.fetch("y"), 2 * x)


@needs_compiler
@pytest.mark.parametrize("engine", ["simple", "async_scheduling", "graph"])
def test_a_blob_is_read_on_one_device_and_made_anew_on_another(engine):
    """What is on the host goes to the device before the host has the new value."""
    ws = gpunet.Workspace("sim:0")
    ops = [op("Flatten", "x", "y"), op("Softmax", "z", "x", axis=1)]
    ops[1].device_option.device_type = PROTO_CPU
    ws.create(NetDef(name="n", op=ops, external_input=["x", "z"]), engine=engine)
    for size in (2, 7):
        x = np.arange(3 * size, dtype=np.float32).reshape(3, size)
        ws.feed("x", x)
        ws.feed("z", np.zeros((2, 2), np.float32))
        for _ in range(2):
            ws.run("n")
            np.testing.assert_array_equal(ws.fetch("y"), x)
            np.testing.assert_array_equal(ws.fetch("x"), np.full((2, 2), 0.5))
            x = np.full((2, 2), 0.5, np.float32)


def test_a_blob_written_twice_holds_the_last_value(ws):
    ws.feed("a", np.zeros(2, dtype=np.float32))
    ws.feed("b", np.zeros((3, 3), dtype=np.float32))
    ws.create(NetDef(name="n", op=[op("Relu", "a", "y"), op("Sum", "y y", "s"), op("Sigmoid", "b", "y")]))
    for _ in range(3):
        ws.run("n")
        assert ws.fetch("y").shape == (3, 3)
        assert ws.fetch("s").shape == (2,)


def test_dynamic_operators_cut_a_net_and_the_rest_follows(ws):
    """The shape comes from a tensor, so what follows is bound when the shape is known."""
    net = NetDef(
        name="n", op=[op("Relu", "x", "y"), op("Reshape", "y shape", "z old"), op("Sigmoid", "z", "w")]
    )
    ws.feed("x", np.zeros((2, 6), dtype=np.float32))
    ws.create(net)
    for shape in [(3, 4), (12,), (2, 2, 3)]:
        ws.feed("shape", np.array(shape, dtype=np.int64))
        ws.run("n")
        assert ws.fetch("w").shape == shape


def test_an_operator_whose_shapes_depend_on_data_is_compiled_once(ws):
    """As long as what it reads has the same shapes; with others it may be an operator like others."""
    ops = [op("Tanh", "x", "a"), op("Reshape", "a s", "b old"), op("Sqr", "b", "y")]
    ws.create(NetDef(name="n", op=ops))
    ws.feed("s", np.array([3, 2]))
    passes: list[str] = []
    ws.program("n").seen = lambda name, graph: passes.append(name)
    for shape, compiles in [((2, 3), True), ((2, 3), False), ((6, 1), True), ((6, 1), False)]:
        passes.clear()
        ws.feed("x", np.ones(shape, np.float32))
        ws.run("n", 2)
        assert bool(passes) == compiles
        assert ws.fetch("y").shape == (3, 2)
    ws.feed("s", np.array([2, 3]))
    ws.run("n")
    assert ws.fetch("y").shape == (2, 3)


def test_a_net_is_prepared_without_a_run_unless_later_shapes_need_one(ws):
    """Split is told its sizes by a blob, which is known where Concat makes it: nothing has to run."""
    ws.feed("x", np.ones((2, 3), dtype=np.float32))
    ops = [op("Concat", "x x", "y s"), op("Split", "y s", "a b"), op("Tanh", "a", "z")]
    program = ws.program(ws.create(NetDef(name="n", op=ops)))
    called = []
    with observe(ws, "n", before=called.append):
        program.prepare()
        assert len(program.segments()) == 1
        assert not called
        ws.run("n")
    assert len(called) == 3


def test_random_draws_move_on_and_follow_the_seed():
    def draw(seed: int, runs: int) -> np.ndarray:
        ws = gpunet.Workspace("cpu", seed=seed)
        ws.create(NetDef(name="n", op=[op("UniformFill", "", "x", shape=[4])]))
        ws.run("n", runs)
        return ws.fetch("x")

    np.testing.assert_array_equal(draw(1, 1), draw(1, 1))
    assert not np.array_equal(draw(1, 1), draw(2, 1))
    assert not np.array_equal(draw(1, 1), draw(1, 2))


def test_random_draws_of_operators_differ_and_random_seed_wins():
    def draw(seed: int, option: int) -> dict[str, np.ndarray]:
        ws = gpunet.Workspace("cpu", seed=seed)
        fills = [op("UniformFill", "", "a", shape=[4]), op("UniformFill", "", "b", shape=[4])]
        for fill in fills:
            fill.device_option.random_seed = option
        ws.run_once(NetDef(name="n", op=fills))
        return {name: ws.fetch(name) for name in "ab"}

    free = draw(1, 0)
    assert not np.array_equal(free["a"], free["b"])
    np.testing.assert_array_equal(draw(1, 5)["a"], draw(2, 5)["a"])
    assert not np.array_equal(draw(1, 5)["a"], draw(1, 6)["a"])


def test_random_positions_are_restored():
    net = NetDef(name="n", op=[op("UniformFill", "", "x", shape=[4])])
    one, two = gpunet.Workspace("cpu"), gpunet.Workspace("cpu")
    one.create(net)
    one.run("n", 3)
    two.restore_steps(one.steps())
    two.create(net)
    one.run("n")
    two.run("n")
    np.testing.assert_array_equal(one.fetch("x"), two.fetch("x"))


def test_empty_nets_and_long_nets(ws):
    ws.run_once(NetDef(name="empty"))
    ws.feed("x0", np.ones(1, dtype=np.float32))
    ws.create(NetDef(name="long", op=[op("Relu", f"x{i}", f"x{i + 1}") for i in range(3000)]))
    ws.run("long")
    assert ws.fetch("x3000").tolist() == [1]


X = np.ones((2, 3), dtype=np.float32)

ERRORS = [
    (
        "unknown type",
        [op("Relux", "x", "y")],
        SchemaError,
        "op 0 'y' in net 'n': unknown operator type 'Relux'; did you mean Relu",
    ),
    (
        "missing blob",
        [op("Relu", "nope", "y")],
        BlobError,
        "[Relu] op 0 'y' in net 'n': input X: blob 'nope' does not exist",
    ),
    ("two inputs", [op("Relu", "x x", "y")], SchemaError, "has 2 inputs, wanted 1 (X)"),
    ("no output", [op("Relu", "x", "")], SchemaError, "has 0 outputs, wanted 1 (Y)"),
    (
        "wrong type",
        [op("Relu", "i", "y")],
        DataTypeError,
        "input X ('i') is int32 2, wanted one of bfloat16, float16, float32, float64",
    ),
    ("string", [op("Relu", "s", "y")], DataTypeError, "input X ('s') is byte string"),
    (
        "wrong rank",
        [op("Conv", "x w", "y", kernel=1)],
        ShapeError,
        "[Conv] op 0 'y' in net 'n': input X (float32 2x3)",
    ),
    ("channels", [op("Conv", "img w", "y", kernel=1)], ShapeError, "channels"),
    ("argument type", [op("Conv", "img w", "y", kernel="a")], ArgumentError, "argument 'kernel' holds"),
    ("argument value", [op("Softmax", "x", "y", axis=5)], ArgumentError, "axis"),
    ("not in place", [op("Softmax", "x", "x"), op("Transpose", "x", "x")], SchemaError, "in place"),
    ("outputs twice", [op("Split", "x", "y y", axis=0)], SchemaError, "name a blob twice"),
    (
        "labels",
        [op("SoftmaxWithLoss", "x label", "p l")],
        KernelError,
        "[SoftmaxWithLoss] op 0 'p' in net 'n'",
    ),
    (
        "used before made",
        [op("Relu", "b", "c"), op("Relu", "x", "b")],
        NetError,
        "'b' is used before it is made by op 1 (Relu)",
    ),
    (
        "cycle",
        [op("Relu", "b", "c"), op("Relu", "c", "b")],
        NetError,
        "the operators form a cycle: Relu 'c' -> Relu 'b' -> Relu 'c'",
    ),
]


@pytest.mark.parametrize(
    ("ops", "kind", "message"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS]
)
def test_errors_say_what_and_where(ws, ops, kind, message):
    ws.feed("x", X)
    ws.feed("i", np.array([1, 2], dtype=np.int32))
    ws.feed("s", "text")
    ws.feed("img", np.ones((1, 3, 4, 4), dtype=np.float32))
    ws.feed("w", np.ones((2, 4, 1, 1), dtype=np.float32))
    ws.feed("label", np.array([0, 9], dtype=np.int32))
    with pytest.raises(kind) as caught:
        ws.run_once(NetDef(name="n", op=ops))
    assert message in str(caught.value)
    assert isinstance(caught.value, GpunetError)


def test_sources_are_checked_where_external_inputs_are_declared(ws):
    ws.feed("x", X)
    ws.feed("z", X)
    net = NetDef(name="n", op=[op("Relu", "z", "y")], external_input=["x"])
    with pytest.raises(NetError, match="source of input 'z' is unknown"):
        ws.create(net)
    net = NetDef(name="n", op=[op("Relu", "x", "y")], external_input=["x"], external_output=["q"])
    with pytest.raises(NetError, match="declares output 'q', but no operator makes it"):
        ws.create(net)


def test_a_net_may_read_what_it_overwrites_later(ws):
    """State carried from run to run, in a net that declares no external inputs."""
    ws.feed("state", np.array([1.0], dtype=np.float32))
    ws.create(NetDef(name="n", op=[op("Sum", "state state", "next"), op("Copy", "next", "state")]))
    ws.run("n", 3)
    assert ws.fetch("state").tolist() == [8]


def test_an_error_in_the_middle_leaves_the_workspace_usable(ws):
    ws.feed("x", X)
    ws.feed("label", np.array([0, 9], dtype=np.int32))
    ws.create(NetDef(name="n", op=[op("Relu", "x", "y"), op("SoftmaxWithLoss", "y label", "p l")]))
    with pytest.raises(KernelError, match="9"):
        ws.run("n")
    assert ws.fetch("y").shape == (2, 3)
    ws.feed("label", np.array([0, 1], dtype=np.int32))
    ws.run("n")
    assert np.isfinite(ws.fetch("l"))


def test_unknown_net_type(ws):
    with pytest.raises(NetError, match="type 'quantum', wanted one of async_dag"):
        ws.create(NetDef(name="n", type="quantum"))


@pytest.mark.parametrize("type", ["simple", "dag", "async_scheduling", "prof_dag"])
def test_net_types_of_caffe2(ws, type):
    ws.feed("x", X)
    ws.run_once(NetDef(name="n", type=type, op=[op("Relu", "x", "y")]))
    assert ws.has("y")


def test_engines_fall_back_left_to_right(ws):
    ws.feed("x", np.array([-1, 2], dtype=np.float32))
    ws.run_operator(op("Relu", "x", "y", engine="NNPACK, CUDNN"))
    assert ws.fetch("y").tolist() == [0, 2]


def test_unknown_arguments_are_ignored(ws):
    ws.feed("x", np.array([-1, 2], dtype=np.float32))
    ws.run_operator(op("Relu", "x", "y", order="NCHW", cudnn_exhaustive_search=0, whatever=[1.5]))
    assert ws.fetch("y").tolist() == [0, 2]


@pytest.mark.parametrize("option", ["keep", "without"])
def test_a_text_is_not_taken_for_a_list_of_its_letters(ws, option):
    with pytest.raises(NetError, match=f"net 'n': {option} is the text 'y', wanted names, as \\['y'\\]"):
        ws.create(NetDef(name="n", op=[op("Relu", "x", "y")]), **{option: "y"})


def test_only_blobs_that_there_are_can_be_kept(ws):
    """A name that is mistyped would else be missed after the run."""
    net = NetDef(name="n", op=[op("Relu", "x", "hidden"), op("Tanh", "hidden", "y")])
    with pytest.raises(
        NetError,
        match=r"net 'n' cannot keep 'hiden': none of its operators reads or writes such a blob, wanted one "
        r"of its 3 blobs, as 'hidden'$",
    ):
        ws.create(net, keep=["y", "hiden"])
    with pytest.raises(NetError, match=r"cannot keep '': .*, as 'hidden', 'x', 'y'$"):
        ws.create(net, keep=[""])
    with pytest.raises(NetError, match=r"wanted one of its 0 blobs$"):
        ws.create(NetDef(name="empty"), keep=["y"])
    ws.create(net, keep=["x", "hidden"])

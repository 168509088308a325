"""Blobs in and out of a workspace, and nets that run in it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gpunet
from gpunet.definitions import make_operator
from gpunet.dtypes import bfloat16
from gpunet.errors import BlobError, DataTypeError, DeviceError, FormatError, NetError, ShapeError
from gpunet.proto import NetDef, OperatorDef, TensorProto
from gpunet.serialization import tensor_to_proto
from tests.nets import op


@pytest.fixture
def ws() -> gpunet.Workspace:
    return gpunet.Workspace("cpu")


def relu_net(name: str = "n") -> gpunet.Net:
    net = gpunet.Net(name)
    net.add("Relu", "x", "y")
    return net


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), dtype=np.int64),
        np.array(3.5),
        np.array([True, False]),
        np.arange(8, dtype=np.float16)[::2],
        np.arange(8).astype(bfloat16())[::2],
        np.asfortranarray(np.ones((2, 3), dtype=np.uint8)),
    ],
)
def test_fetch_gives_what_was_fed(ws, value):
    ws.feed("x", value)
    got = ws.fetch("x")
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    np.testing.assert_array_equal(got, value)


def test_feed_and_fetch_copy(ws):
    value = np.ones(3, dtype=np.float32)
    ws.feed("x", value)
    value[0] = 7
    got = ws.fetch("x")
    got[1] = 8
    np.testing.assert_array_equal(ws.fetch("x"), np.ones(3))


def test_feed_takes_what_users_have(ws):
    ws.feed("list", [[1, 2], [3, 4]])
    assert ws.fetch("list").dtype == np.int64
    ws.feed("number", 2.5)
    assert ws.fetch("number").shape == ()
    ws.feed("big_endian", np.arange(3, dtype=">f4"))
    assert ws.fetch("big_endian").dtype == np.dtype("=f4")
    ws.feed("text", "grüße")
    assert ws.fetch("text") == "grüße".encode()
    ws.feed("texts", np.array([["a", "bc"]]))
    assert ws.fetch("texts").tolist() == [[b"a", b"bc"]]
    ws.feed("proto", tensor_to_proto(np.arange(4, dtype=np.int32)))
    assert ws.fetch("proto").tolist() == [0, 1, 2, 3]
    lock = threading.Lock()
    ws.feed("lock", lock)
    assert ws.fetch("lock") is lock


def test_quantized_tensors_keep_scale_and_zero_point(ws):
    ws.feed("q", gpunet.QuantizedTensor(np.arange(4, dtype=np.uint8), 0.5, 2))
    got = ws.fetch("q")
    assert (got.scale, got.zero_point, got.data.tolist()) == (0.5, 2, [0, 1, 2, 3])
    got.data[0] = 9
    assert ws.fetch("q").data[0] == 0


@pytest.mark.parametrize(
    "value", [np.zeros(2, dtype=complex), np.array(["2020-01-01"], dtype="M8[D]"), np.array([{}])]
)
def test_feed_refuses_types_that_no_tensor_has(ws, value):
    with pytest.raises(DataTypeError, match="cannot feed blob 'x'"):
        ws.feed("x", value)


def test_feed_refuses_ragged_lists(ws):
    with pytest.raises(ShapeError, match="cannot feed blob 'x': the nested lists form no array"):
        ws.feed("x", [[1], [2, 3]])


@pytest.mark.parametrize("device", [None, 0, b"cpu"])
def test_a_device_is_a_name(device):
    with pytest.raises(DeviceError, match="unknown device"):
        gpunet.Workspace(device)


@pytest.mark.parametrize("shape", [[2**40, 2**40], [0, 2**62, 2**62], [1] * 70], ids=["big", "empty", "rank"])
def test_shapes_beyond_all_memory_are_refused(ws, shape):
    fill = make_operator("ConstantFill", [], "y", shape=shape)
    with pytest.raises(ShapeError, match=r"^\[ConstantFill\] op 'y': output Y would be .*at most 32"):
        ws.run_operator(fill)
    with pytest.raises(ShapeError, match=r"op 0 'y' in net 'n'"):
        gpunet.infer(NetDef(name="n", op=[fill]), {})


def test_names_of_blobs_and_missing_ones(ws):
    ws.feed("b", 1.0)
    ws.feed("a", 1.0)
    assert ws.blobs() == ["a", "b"]
    assert ws.has("a")
    assert not ws.has("c")
    with pytest.raises(BlobError, match="blob 'c' does not exist"):
        ws.fetch("c")
    ws.remove("a")
    assert not ws.has("a")
    with pytest.raises(BlobError, match="'a'"):
        ws.remove("a")


def test_what_was_internal_to_a_net_is_forgotten_with_it(ws):
    net = NetDef(name="n", op=[op("Tanh", "x", "h"), op("Sqr", "h", "y")], external_input=["x"])
    net.external_output.append("y")
    for forget in (ws.reset, lambda: (ws.feed("h", 1.0), ws.remove("h"))):
        ws.feed("x", np.ones(2, np.float32))
        ws.create(net, overwrite=True)
        ws.run("n")
        with pytest.raises(BlobError, match="blob 'h' is internal to net 'n'"):
            ws.fetch("h")
        forget()
        with pytest.raises(BlobError, match="blob 'h' does not exist"):
            ws.fetch("h")


def test_reset_forgets_everything(ws):
    ws.feed("x", np.ones(2, dtype=np.float32))
    ws.create(relu_net())
    ws.run("n")
    ws.reset()
    assert ws.blobs() == []
    assert ws.nets() == []
    assert ws.steps() == {}


def test_operators_come_as_messages_or_bytes(ws):
    ws.feed("x", np.array([-1, 2], dtype=np.float32))
    op = OperatorDef(type="Relu", input=["x"], output=["y"])
    ws.run_operator(op)
    ws.run_operator(op.SerializeToString())
    assert ws.fetch("y").tolist() == [0, 2]


@pytest.mark.parametrize(
    "form", [lambda net: net, lambda net: net.proto, lambda net: net.proto.SerializeToString()]
)
def test_nets_come_in_three_forms(ws, form):
    ws.feed("x", np.array([-1, 2], dtype=np.float32))
    ws.run_once(form(relu_net()))
    assert ws.create(form(relu_net())) == "n"
    ws.run("n", 2)
    assert ws.fetch("y").tolist() == [0, 2]


def test_something_else_is_no_net(ws):
    with pytest.raises(NetError, match="found int as a net"):
        ws.run_once(3)
    with pytest.raises(FormatError, match="net"):
        ws.create(b"\xff\xff\xff\xff")


def test_a_net_is_not_overwritten_unasked(ws):
    ws.create(relu_net())
    with pytest.raises(NetError, match="'n' exists already"):
        ws.create(relu_net())
    ws.create(relu_net(), overwrite=True)
    with pytest.raises(NetError, match="no net named 'm', wanted one that was created: 'n'"):
        ws.run("m")


def test_the_created_net_is_a_copy(ws):
    ws.feed("x", np.array([-1, 2], dtype=np.float32))
    net = relu_net()
    ws.create(net)
    net.add("Sigmoid", "y", "z")
    ws.run("n")
    assert not ws.has("z")


def test_devices():
    assert str(gpunet.Workspace().device) == str(gpunet.Workspace("auto").device)
    for name in ("gpu", "cuda:x", "cpu:", ""):
        with pytest.raises(DeviceError, match="unknown device"):
            gpunet.Workspace(name)


def test_two_nets_at_once_are_refused(ws):
    """A kernel that runs the workspace again from another thread is told so, and nothing hangs."""
    errors = []
    ws.feed("x", np.ones(2, dtype=np.float32))
    ws.create(relu_net())

    def intrude() -> None:
        try:
            ws.run("n")
        except NetError as error:
            errors.append(str(error))

    with ws._exclusively("test"):
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert errors
    assert "another net of this workspace is running" in errors[0]
    ws.run("n")


def test_a_net_on_a_device_that_is_not_here_runs_and_says_so_once(ws, caplog):
    net = NetDef(name="n", op=[OperatorDef(type="Relu", input=["x"], output=["y"])])
    net.device_option.device_type = gpunet.proto.PROTO_CUDA
    net.device_option.device_id = 61
    ws.feed("x", np.array([-1, 2], dtype=np.float32))
    ws.run_once(net)
    ws.run_once(net)
    assert ws.fetch("y").tolist() == [0, 2]
    assert sum("cuda:61" in record.getMessage() for record in caplog.records) == 1


def test_tensor_proto_of_another_kind(ws):
    with pytest.raises(FormatError):
        ws.feed("x", TensorProto(dims=[2], data_type=TensorProto.FLOAT))


def test_arguments_that_make_no_sense_are_named(ws):
    ws.create(relu_net())
    with pytest.raises(NetError, match="to run 'x' times, wanted a whole number"):
        ws.run("n", n="x")
    for name in ("", 3, None):
        with pytest.raises(BlobError, match="cannot feed a blob named"):
            ws.feed(name, 1.0)
    for quantized in (
        gpunet.QuantizedTensor(np.zeros(2, np.float32), 0.5, 0),
        gpunet.QuantizedTensor(np.zeros(2, np.uint8), 0.0, 0),
    ):
        with pytest.raises(DataTypeError, match="blob 'q': the quantised tensor"):
            ws.feed("q", quantized)
    with pytest.raises(ShapeError, match=r"blob 'p' is given as 3, wanted \(shape, element type\)"):
        gpunet.infer(NetDef(), {"p": 3})

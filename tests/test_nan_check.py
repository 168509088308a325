"""The finder of NaN: it names the first operator whose output is bad, and says what it was given."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet import nan_check
from gpunet.cuda_kernels.sim import toolchain
from gpunet.dtypes import bfloat16
from gpunet.errors import KernelError
from gpunet.proto import NetDef, OperatorDef
from tests.nets import op


def net(*ops: OperatorDef, keep: str = "y") -> NetDef:
    return NetDef(name="n", op=ops, external_input=["x"], external_output=keep.split())


BAD = net(op("Relu", "x", "a"), op("Log", "a", "l"), op("Sqr", "l", "y"))


def workspace(definition: NetDef, device: str = "cpu", **options) -> gpunet.Workspace:
    ws = gpunet.Workspace(device)
    ws.feed("x", np.array([[1, 2, 3], [0.5, -1, 4]], dtype=np.float32))
    ws.create(definition, **options)
    nan_check.watch(ws)
    return ws


@pytest.mark.parametrize("engine", ["simple", "async_scheduling", "graph"])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_the_first_is_named_on_every_engine_and_device(device, engine):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    ws = workspace(BAD, device, engine=engine, workers=2, streams=2, without=["fusion"])
    for _ in range(3):
        with pytest.raises(KernelError) as caught:
            ws.run("n")
        message = str(caught.value)
        assert message.startswith("[Log] op 1 'l' in net 'n': output Y 'l' (float32 2x3) has 1 of 6 elements")
        assert "(0 NaN, 1 infinite), the first at [1, 1]; the others: min -0.693147, max 1.38629" in message
        # It was overwritten by the output.
        assert "input 'a' (float32 2x3) is finite: min 0, max 4, mean 1.75" in message
    ws.feed("x", np.ones((2, 3), dtype=np.float32))
    ws.run("n")
    np.testing.assert_array_equal(ws.fetch("y"), np.zeros((2, 3)))


def test_the_culprit_inside_of_a_fused_operator_is_named():
    ws = workspace(net(op("Relu", "x", "a"), op("Log", "a", "l"), op("Mul", "l x", "y")))
    ws.feed("x", np.zeros((512, 512), dtype=np.float32))
    with pytest.raises(KernelError) as caught:
        ws.run("n")
    message = str(caught.value)
    assert message.startswith("[FusedElementwise] op 2 'y = ")
    assert "262144 NaN" in message
    assert "; inside of it: [Log] op " in message
    assert "262144 infinite" in message


def test_nets_without_it_do_not_look():
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.zeros((2, 3), dtype=np.float32))
    ws.create(BAD)
    ws.run("n")
    assert np.isinf(ws.fetch("y")).all()


def test_an_operator_in_place_of_its_input_tells_what_was_there():
    definition = net(op("Log", "x", "x"), op("Copy", "x", "y"), keep="y x")
    with pytest.raises(
        KernelError, match=r"\[Log\].*1 NaN.*input 'x' \(float32 2x3\) is finite: min -1, max 4"
    ):
        workspace(definition).run("n")


def test_an_input_that_is_bad_already_shows():
    ws = workspace(net(op("Relu", "x", "y")))
    ws.feed("x", np.array([np.nan, 1], dtype=np.float32))
    with pytest.raises(KernelError, match=r"\[Relu\].*input 'x' \(float32 2\) has 1 of 2 elements"):
        ws.run("n")


def test_all_nets_of_a_workspace_are_watched():
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.full(2, 1e30, dtype=np.float32))
    for name in ("first", "second"):
        ws.create(NetDef(name=name, op=[op("Sqr", "x", "y")], external_input=["x"]))
    nan_check.watch(ws)
    for name in ("first", "second"):
        with pytest.raises(KernelError, match=f"net '{name}'.*2 infinite.*the others: none"):
            ws.run(name)


def test_constants_are_looked_at():
    ops = [op("ConstantFill", "", "c", shape=[2, 3], value=0.0), op("Log", "c", "l"), op("Mul", "x l", "y")]
    with pytest.raises(KernelError, match=r"\[Log\] op 1 'l'"):
        workspace(net(*ops), without=["fusion"]).run("n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((0, 3), np.float32), "'b' (float32 0x3) is empty"),
        (np.array([1, 5], np.int64), "'b' (int64 2) is finite: min 1, max 5, mean 3"),
        (
            np.array([np.nan], np.float16),
            "'b' (float16 1) has 1 of 1 elements that are not finite (1 NaN, 0 infinite), "
            "the first at [0]; the others: none",
        ),
        (
            np.array([1, -np.inf, np.nan, 3]).astype(bfloat16()),
            "'b' (bfloat16 4) has 2 of 4 elements that are not finite (1 NaN, 1 infinite), "
            "the first at [1]; the others: min 1, max 3, mean 2",
        ),
        (b"text", "'b' (byte string)"),
    ],
)
def test_descriptions(value, text):
    assert nan_check.describe("b", value) == text


def test_whole_numbers_and_texts_are_never_bad():
    assert not nan_check.is_bad(np.array([1, 2]))
    assert not nan_check.is_bad(np.array([1, 2]).astype(bfloat16()))
    assert nan_check.is_bad(np.array([1, np.nan]).astype(bfloat16()))
    assert not nan_check.is_bad(np.array([b"a"], dtype=object))
    assert not nan_check.is_bad(b"nan")
    assert nan_check.is_bad(np.array(np.inf))


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("without", [(), ("fusion",)])
def test_a_guarded_logarithm_is_finite(device, without):
    if device != "cpu" and toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    definition = net(op("Relu", "x", "a"), op("Log", "a", "l", epsilon=1e-6), op("Sqr", "l", "y"))
    ws = workspace(definition, device, without=without)
    ws.run("n")
    x = np.array([[1, 2, 3], [0.5, -1, 4]])
    np.testing.assert_allclose(ws.fetch("y"), np.log(np.maximum(x, 1e-6)) ** 2, rtol=1e-5)

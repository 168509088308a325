"""Gradients of nets: against the graphs that Caffe2 built, and the rules one by one."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

import gpunet
from gpunet.errors import GradientError
from gpunet.gradients import backward
from gpunet.proto import NetDef, OperatorDef
from tests.nets import op

NETS = sorted((pathlib.Path(__file__).parent / "golden" / "nets").glob("*.npz"))


def essence(definition: OperatorDef) -> tuple:
    arguments = sorted(arg.SerializeToString() for arg in definition.arg)
    device = definition.device_option
    return (
        definition.type,
        list(definition.input),
        list(definition.output),
        definition.engine,
        arguments,
        (device.device_type, device.device_id, list(device.extra_info)),
        definition.is_gradient_op,
    )


@pytest.mark.parametrize("path", NETS, ids=lambda path: path.stem)
def test_the_graph_is_that_of_caffe2(path):
    """Forward operators of a recorded net, differentiated again: ops, names, arguments, devices agree."""
    with np.load(path, allow_pickle=False) as recorded:
        operators = list(NetDef.FromString(recorded["net"].tobytes()).op)
    seeds = [i for i, o in enumerate(operators) if o.output and o.output[0].endswith("_autogen_grad")]
    start = seeds[0]
    made, _ = backward(operators[:start], [operators[i].input[0] for i in seeds])
    assert [essence(o) for o in made] == [essence(o) for o in operators[start : start + len(made)]]
    assert not any(o.is_gradient_op for o in operators[start + len(made) :]), (
        "Caffe2 has further gradient operators"
    )


def names(definitions: list[OperatorDef]) -> list[str]:
    return [f"{d.type}({','.join(d.input)})->{','.join(d.output)}" for d in definitions]


def test_one_use_keeps_the_plain_name():
    made, grads = backward([op("Relu", "x", "y")], ["y"])
    assert names(made) == ["ConstantFill(y)->y_autogen_grad", "ReluGradient(y,y_autogen_grad)->x_grad"]
    assert grads == {"y": "y_autogen_grad", "x": "x_grad"}
    assert [d.is_gradient_op for d in made] == [False, True]


def test_several_uses_are_summed_in_reverse_order():
    made, grads = backward(
        [op("Relu", "x", "a"), op("Tanh", "x", "b"), op("Sigmoid", "x", "c")], ["a", "b", "c"]
    )
    assert names(made)[3:] == [
        "SigmoidGradient(c,c_autogen_grad)->x_grad",
        "TanhGradient(b,b_autogen_grad)->_x_grad_autosplit_0",
        "ReluGradient(a,a_autogen_grad)->_x_grad_autosplit_1",
        "Sum(x_grad,_x_grad_autosplit_0,_x_grad_autosplit_1)->x_grad",
    ]
    assert grads["x"] == "x_grad"


def test_given_gradients_replace_the_seed():
    made, grads = backward([op("Relu", "x", "y")], {"y": "dy"})
    assert names(made) == ["ReluGradient(y,dy)->x_grad"]
    assert grads["y"] == "dy"


def test_nothing_flows_past_stop_gradient_or_into_unused_branches():
    made, grads = backward(
        [op("Relu", "x", "a"), op("StopGradient", "a", "a"), op("Tanh", "a", "y"), op("Relu", "x", "z")],
        ["y"],
    )
    assert "x" not in grads
    assert [d.type for d in made] == ["ConstantFill", "TanhGradient"]


def test_an_orphaned_stop_gradient_is_an_error():
    with pytest.raises(GradientError, match=r"StopGradient.*used by no operator"):
        backward([op("Relu", "x", "a"), op("StopGradient", "a", "b"), op("Tanh", "a", "y")], ["y"])


def test_in_place_operators():
    made, grads = backward([op("FC", "x w b", "y"), op("Relu", "y", "y")], ["y"])
    assert names(made)[1:] == [
        "ReluGradient(y,y_autogen_grad)->y_grad",
        "FCGradient(x,w,y_grad)->w_grad,b_grad,x_grad",
    ]
    assert grads["x"] == "x_grad"


def test_in_place_over_an_output_that_a_gradient_needs():
    with pytest.raises(GradientError, match=r"\[Tanh\] op 0? ?'y': the gradient needs output 'y'"):
        backward([op("Tanh", "x", "y"), op("Relu", "y", "y")], ["y"])


def test_a_blob_that_was_overwritten_is_an_error_that_names_both():
    forward = [op("Tanh", "x", "y"), op("Sigmoid", "y", "z"), op("Tanh", "x", "z2"), op("Sigmoid", "z2", "y")]
    with pytest.raises(GradientError, match=r"\[Tanh\] op 'y': the gradient needs output 'y'"):
        backward(forward, ["z"])


def test_an_operator_without_gradient_is_named():
    with pytest.raises(GradientError, match=r"\[Accuracy\].*not differentiable"):
        backward([op("Softmax", "x", "p"), op("Accuracy", "p label", "a")], ["a"])


def test_a_target_that_nobody_makes():
    with pytest.raises(GradientError, match="cannot differentiate 'q'"):
        backward([op("Relu", "x", "y")], ["q"])


def test_devices_and_engines_are_inherited():
    forward = op("Relu", "x", "y", engine="CUDNN")
    forward.device_option.device_type = 1
    forward.device_option.device_id = 2
    made, _ = backward([forward], ["y"])
    assert all((d.device_option.device_type, d.device_option.device_id) == (1, 2) for d in made)
    assert made[1].engine == "CUDNN"


def test_gradients_from_different_devices_are_not_summed():
    first, second = op("Relu", "x", "a"), op("Tanh", "x", "b")
    second.device_option.device_type = 1
    with pytest.raises(GradientError, match="different devices"):
        backward([first, second], ["a", "b"])


def test_sparse_gradients_are_concatenated():
    made, grads = backward([op("Gather", "w i", "a"), op("Gather", "w j", "b")], ["a", "b"])
    assert [d.type for d in made[-2:]] == ["Concat", "Concat"]
    assert grads["w"] == gpunet.GradientSlice("w_grad_indices_concat", "w_grad_values_concat")


def test_sparse_and_dense_do_not_mix():
    with pytest.raises(GradientError, match="both sparse and dense"):
        backward([op("Gather", "w i", "a"), op("Tanh", "w", "b")], ["a", "b"])


def test_gradient_ops_of_one_operator():
    made, grads = gpunet.gradient_ops(op("Relu", "x", "y"), {"y": "dy"})
    assert names(made) == ["ReluGradient(y,dy)->x_grad"]
    assert grads == {"x": "x_grad"}
    with pytest.raises(GradientError, match="gradient of output 'y' is not provided"):
        gpunet.gradient_ops(op("Relu", "x", "y"), {})


def test_numbers_of_a_net_with_every_kind_of_use():
    """Central differences of a whole graph: shared, in place, stopped, summed."""
    forward = [
        op("Tanh", "x", "h"),
        op("Mul", "h h", "q"),
        op("Add", "q x", "s"),
        op("Relu", "s", "s"),
        op("Sum", "s h q", "t"),
        op("AveragedLoss", "t", "loss"),
    ]
    made, grads = backward(forward, {"loss": "dloss"})
    x = np.random.default_rng(3).normal(size=(3, 4))
    ws = gpunet.Workspace("cpu")
    ws.feed("x", x)
    ws.feed("dloss", 1.0)
    ws.create(NetDef(name="n", op=[*forward, *made]))

    def loss(value: np.ndarray) -> float:
        ws.feed("x", value)
        ws.run("n")
        return float(ws.fetch("loss"))

    loss(x)
    analytic = ws.fetch(grads["x"])
    for index in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-6
        numeric = (loss(x + step) - loss(x - step)) / 2e-6
        np.testing.assert_allclose(analytic[index], numeric, rtol=1e-4, atol=1e-7)

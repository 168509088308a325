"""Gradients of elementwise operators that the table cannot hold: Pow with two inputs, refusals."""

from __future__ import annotations

import numpy as np
import pytest

import gpunet
from gpunet.definitions import make_operator
from gpunet.errors import GradientError


@pytest.mark.parametrize(
    ("shape", "args", "axes"),
    [
        ((3, 4), {}, ()),
        ((4,), {"broadcast": 1}, (0,)),
        ((3,), {"broadcast": 1, "axis": 0}, (1,)),
        ((1,), {"broadcast": 1}, (0, 1)),
    ],
)
def test_pow_with_two_inputs(shape: tuple[int, ...], args: dict[str, int], axes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(18)
    x = rng.uniform(0.4, 2.5, (3, 4)).astype(np.float32)
    exponents = rng.uniform(-2, 2, shape).astype(np.float32)
    dy = rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
    op = make_operator("Pow", ["x", "e"], ["y"], **args)
    workspace = gpunet.Workspace("cpu")
    for name, value in (("x", x), ("e", exponents), ("y_grad", dy)):
        workspace.feed(name, value)
    workspace.run_operator(op)
    operators, grads = gpunet.gradient_ops(op, {"y": "y_grad"})
    for each in operators:
        workspace.run_operator(each)
    e = exponents.astype(np.float64)
    spread = np.broadcast_to(e[:, None] if args.get("axis") == 0 else e, x.shape)
    y = np.power(x.astype(np.float64), spread)
    np.testing.assert_allclose(workspace.fetch(grads["x"]), spread * y / x * dy, rtol=1e-4)
    want = (np.log(x.astype(np.float64)) * y * dy).sum(axes).reshape(shape)
    np.testing.assert_allclose(workspace.fetch(grads["e"]), want, rtol=1e-4, atol=1e-5)


def test_pow_refuses_one_blob_for_both() -> None:
    with pytest.raises(GradientError, match="base and exponent are one blob 'x'"):
        gpunet.gradient_ops(make_operator("Pow", ["x", "x"], ["y"]), {"y": "y_grad"})


def test_gradient_needs_the_input_that_was_overwritten() -> None:
    with pytest.raises(GradientError, match="'x' is overwritten in place"):
        gpunet.gradient_ops(make_operator("Softsign", ["x"], ["x"]), {"x": "x_grad"})

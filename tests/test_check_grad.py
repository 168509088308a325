"""`gpunet check-grad` on operators of one's own: several outputs, work in place, kernels of few types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpunet import custom, gradient_check, operator_check, schema
from gpunet.errors import DataTypeError
from gpunet.operator_check import FAILED, OK, Outcome
from tests.sim_kernels import needs_compiler

pytestmark = pytest.mark.usefixtures("own_registries")


def check(type: str, *devices: str, shape: str = "3x5") -> list[Outcome]:
    return operator_check.check_operator(type, operator_check.samples(type, [shape]), devices)


def statuses(outcomes: list[Outcome]) -> dict[str, str]:
    return {f"{o.operator} {o.check}": o.status for o in outcomes}


SIN_COS = """
#include "gpunet.cuh"
#define KERNELS(S, T) \\
  extern "C" __global__ void sin_cos_##S(const T* x, T* s, T* c, int64 n) { \\
    GPUNET_LOOP(i, n) { auto v = load(x, i); store(s, i, sin(v)); store(c, i, cos(VALUE)); } } \\
  extern "C" __global__ void sin_cos_gradient_##S(const T* s, const T* c, const T* ds, const T* dc, T* dx, \\
                                                  int64 n) { \\
    GPUNET_LOOP(i, n) store(dx, i, load(ds, i) * load(c, i) - load(dc, i) * load(s, i)); }
GPUNET_FLOATS(KERNELS)
"""


def sin_cos(
    value: str, gradient: Callable[..., Any] = lambda s, c, ds, dc: ds * c - dc * s, name: str = "SinCos"
) -> None:
    """Two outputs, of which both have gradients, and the first may lie over the input.

    Modules are named by the operator that brings the source, and a device loads each once.
    """
    source = SIN_COS.replace("VALUE", value)
    names = ["S", "C", "dS", "dC"]
    custom.operator(
        f"{name}Gradient",
        inputs=names,
        outputs=["dX"],
        cuda=source,
        function="sin_cos_gradient",
        numpy=gradient,
    )
    custom.operator(
        name,
        outputs=["S", "C"],
        cuda=source,
        function="sin_cos",
        gradient=f"{name}Gradient",
        inplace=[(0, 0)],
        numpy=lambda x: (np.sin(x), np.cos(x)),
    )


@needs_compiler
def test_two_outputs_and_an_inplace_pair() -> None:
    sin_cos("v")
    found = statuses(check("SinCos", "sim:0"))
    assert found == dict.fromkeys(
        [
            "SinCos gradient",
            "SinCos in place on cpu",
            "SinCos sim:0",
            "SinCos threads on sim:0",
            "SinCos in place on sim:0",
            "SinCosGradient sim:0",
            "SinCosGradient threads on sim:0",
        ],
        OK,
    )


@needs_compiler
def test_a_kernel_that_is_wrong_in_place() -> None:
    sin_cos("load(x, i)", name="LateCos")
    failed = [o for o in check("LateCos", "sim:0") if o.status == FAILED]
    assert [o.check for o in failed] == ["in place on sim:0"]
    assert "with outputs over inputs, (input, output) in [(0, 0)]: output 1 of LateCos" in failed[0].detail


def test_a_function_that_is_wrong_in_place() -> None:
    custom.operator("Late", inplace=[(0, 0)], outputs=["Y", "Z"], numpy=late)
    failed = [o for o in check("Late") if o.status == FAILED]
    assert [o.check for o in failed] == ["in place on cpu"]


class Late:
    """An array that is computed when it is copied to the output: after the first output is written."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return self.x + 1


def late(x: np.ndarray) -> tuple[Any, ...]:
    return 2 * x, Late(x)


def test_a_gradient_of_the_second_output_that_is_wrong() -> None:
    sin_cos("v", lambda s, c, ds, dc: ds * c + dc * s)
    (failed,) = (o for o in check("SinCos") if o.status == FAILED)
    assert failed.check == "gradient"
    assert "gradient of input 0, element 0" in failed.detail


@needs_compiler
def test_a_kernel_of_float32_alone() -> None:
    """The function is checked in float64; types that the kernel is not made for run on the CPU."""
    source = """
#include "gpunet.cuh"
extern "C" __global__ void triple_f32(const float* x, float* y, int64 n) {
  GPUNET_LOOP(i, n) y[i] = 3 * x[i];
}
extern "C" __global__ void triple_gradient_f32(const float* dy, float* dx, int64 n) {
  GPUNET_LOOP(i, n) dx[i] = 3 * dy[i];
}
"""
    options: dict[str, Any] = {"cuda": source, "types": ["float32"], "numpy": lambda x: 3 * x}
    custom.operator("TripleGradient", inputs=["dY"], outputs=["dX"], **options)
    custom.operator("Triple", gradient="TripleGradient", **options)
    assert set(statuses(check("Triple", "sim:0")).values()) == {OK}
    reasons = [o.detail for o in check("Triple", "sim:0", shape="float16:4") if o.check == "sim:0"]
    assert reasons[0] == "kernel 'triple' is made for T of float32, found float16"
    x = np.ones(3, np.float64)
    definition = operator_check.samples("Triple", ["float64:3"])[0].definition("Triple")
    assert gradient_check.runs_on(definition, [x], "sim:0") is not None
    assert gradient_check.run(definition, [x], "cpu")[0].dtype == np.float64


def test_types_that_there_are_not() -> None:
    with pytest.raises(DataTypeError, match="found 'float31' as an element type, wanted one of"):
        custom.operator("Odd", numpy=np.abs, types=["float31"])
    assert "Odd" not in schema.registered_types()


@pytest.mark.parametrize(
    ("numpy", "text"),
    [
        (lambda x: 1 / 0, "the kernel failed: ZeroDivisionError"),
        (lambda x, y: x, "the kernel failed: TypeError: .* missing 1 required positional argument: 'y'"),
        (lambda x: x[:1], r"returned Y of shape \(1, 5\), wanted \(3, 5\) as inferred"),
        (lambda x: x, None),
    ],
    ids=["error", "arguments", "shape", "right"],
)
def test_a_function_runs_where_nothing_else_is_to_check(numpy: Callable[..., Any], text: str | None) -> None:
    custom.operator("Alone", numpy=numpy)
    outcomes = check("Alone")
    assert statuses(outcomes) == {
        "Alone cpu": FAILED if text else OK,
        "Alone gradient": operator_check.SKIPPED,
    }
    if text:
        assert re.search(text, outcomes[0].detail)

"""NumPy kernels of comparisons and logic."""

from __future__ import annotations

from functools import partial

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.elementwise import lined_up
from gpunet.cpu_fallback.precision import Arrays
from gpunet.cpu_fallback.steps import Step
from gpunet.kernels import KernelContext, kernel


def _binary_kernel(type: str, function: np.ufunc) -> None:
    @kernel(type, binds=True)
    def bind(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
        return partial(function, *lined_up(inputs, args), outputs[0])


for _type, _function in (
    ("EQ", np.equal),
    ("NE", np.not_equal),
    ("GT", np.greater),
    ("GE", np.greater_equal),
    ("LT", np.less),
    ("LE", np.less_equal),
    ("And", np.logical_and),
    ("Or", np.logical_or),
    ("Xor", np.logical_xor),
):
    _binary_kernel(_type, _function)


@kernel("Not", binds=True)
def logical_not(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = not X``."""
    return partial(np.logical_not, inputs[0], outputs[0])


@kernel("IsEmpty")
def is_empty(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Whether X has no elements."""
    outputs[0][...] = inputs[0].size == 0

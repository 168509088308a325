"""NumPy kernels of copies and type conversions."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Arrays
from gpunet.cpu_fallback.steps import Step, copy_step, in_turn
from gpunet.kernels import KernelContext, kernel

_LARGEST_HALF: Final = 65504.0


@kernel(
    "Copy",
    "CopyFromCPUInput",
    "EnsureCPUOutput",
    "CopyCPUToGPU",
    "CopyGPUToCPU",
    "CopyOnDeviceLike",
    "Alias",
    "StopGradient",
    binds=True,
    bfloat16=True,
)
def copy(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X``."""
    return in_turn(copy_step(inputs[0], outputs[0]))


@kernel("ZeroGradient")
def zero_gradient(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Nothing."""


@kernel("Cast", binds=True)
def cast(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X`` in another element type."""
    x, (y,) = inputs[0], outputs
    if y.dtype != object:
        return partial(np.copyto, y, x, casting="unsafe")
    form = b"%f" if x.dtype.kind == "f" else b"%d"

    def to_text() -> None:
        y[...] = np.array([form % value for value in x.ravel().tolist()], dtype=object).reshape(y.shape)

    return to_text


@kernel("FloatToHalf", binds=True)
def float_to_half(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X`` in float16."""
    x, (y,) = inputs[0], outputs
    if args.clip:
        limit = x.dtype.type(_LARGEST_HALF)
        return partial(np.clip, x, -limit, limit, y, casting="same_kind")
    return partial(np.copyto, y, x)


@kernel("HalfToFloat", binds=True)
def half_to_float(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """``Y = X`` in float32."""
    return partial(np.copyto, outputs[0], inputs[0])

"""NumPy kernels of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.steps import is_same
from gpunet.errors import ShapeError
from gpunet.kernels import KernelContext, kernel

Array = npt.NDArray[Any]
Arrays = tuple[Array, ...]


def _parts(bucket: Array, tensors: Arrays) -> list[Array]:
    """Views of the bucket, one for each tensor and of its shape."""
    parts, begin = [], 0
    for tensor in tensors:
        parts.append(bucket[begin : begin + tensor.size].reshape(tensor.shape))
        begin += tensor.size
    return parts


@kernel("PackBucket", binds=True)
def pack_bucket(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """``bucket = factor * tensors``."""
    factor, tensors = inputs[0].reshape(-1), inputs[1:]
    bucket = outputs[0]
    pairs = list(zip(tensors, _parts(bucket, tensors), strict=True))

    def run() -> None:
        scale = factor[0]
        if scale == 0:
            bucket.fill(0)
            return
        for tensor, part in pairs:
            np.multiply(tensor, scale, out=part, casting="same_kind")

    return run


@kernel("UnpackBucket", binds=True)
def unpack_bucket(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Callable[[], None]:
    """The tensors from their places in the bucket, but for those that lie there."""
    parts = _parts(inputs[0].reshape(-1), outputs)
    pairs = [(t, part) for t, part in zip(outputs, parts, strict=True) if not is_same(t, part)]

    def run() -> None:
        for tensor, part in pairs:
            np.copyto(tensor, part, casting="same_kind")

    return run


@kernel("DrainBucket")
def drain_bucket(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``bucket += gathered``, ``gathered = 0``."""
    np.add(inputs[0], inputs[1], out=outputs[0])
    outputs[1].fill(0)


@kernel("AllgatherSlices")
def allgather_slices(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Array]:
    """The rows of all ranks under each other."""
    from gpunet.distributed import world

    factor, indices, values = inputs[0].reshape(-1)[0], inputs[1].reshape(-1), inputs[2]
    if len(values) != len(indices):
        raise ShapeError(f"{len(indices)} indices and {len(values)} rows of values, wanted equal numbers")
    # A rank without samples has a factor of 0, and gradients of 0/0 that must not spread.
    scaled = values * factor if factor else np.zeros_like(values)
    scaled = scaled.astype(values.dtype, copy=False)
    ranks = world()
    return [ranks.all_gather_rows(array) for array in (indices, scaled)]

"""NumPy kernels of buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
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
    """The tensors from their places in the bucket."""
    pairs = list(zip(outputs, _parts(inputs[0].reshape(-1), outputs), strict=True))

    def run() -> None:
        for tensor, part in pairs:
            np.copyto(tensor, part, casting="same_kind")

    return run


@kernel("AllgatherSlices")
def allgather_slices(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Array]:
    """Slices padded to the longest, gathered, and cut to their lengths again."""
    from gpunet.distributed import world

    factor, indices, values = inputs[0].reshape(-1)[0], inputs[1].reshape(-1), inputs[2]
    if len(values) != len(indices):
        raise ShapeError(f"{len(indices)} indices and {len(values)} rows of values, wanted equal numbers")
    # A rank without samples has a factor of 0, and gradients of 0/0 that must not spread.
    scaled = values * factor if factor else np.zeros_like(values)
    scaled = scaled.astype(values.dtype, copy=False)
    ranks = world()
    if ranks.size == 1:
        return [indices.copy(), scaled]
    counts = np.zeros((ranks.size, 1), np.int64)
    ranks.all_gather(np.array([len(indices)], np.int64), counts)
    longest = int(counts.max())
    if longest == 0:
        return [indices.copy(), scaled]
    results = []
    for array in (indices, scaled):
        padded = np.zeros((longest, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        gathered = np.zeros((ranks.size, *padded.shape), array.dtype)
        ranks.all_gather(padded, gathered)
        results.append(
            np.concatenate([part[:count] for part, count in zip(gathered, counts[:, 0], strict=True)])
        )
    return results

"""NumPy kernel of FoldBatchNorm."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.kernels import KernelContext, kernel

Arrays = tuple[npt.NDArray[Any], ...]


@kernel("FoldBatchNorm")
def fold_batch_norm(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """``W f`` and ``(b - mean) f + bias``; computed in float64, since it is done once."""
    w, scale, bias, mean, var = (x.astype(np.float64) for x in inputs[:5])
    factor = scale / np.sqrt(var + args.epsilon)
    shift = inputs[5] if len(inputs) > 5 else 0.0
    np.copyto(outputs[0], w * factor.reshape(-1, *[1] * (w.ndim - 1)), casting="same_kind")
    np.copyto(outputs[1], (shift - mean) * factor + bias, casting="same_kind")

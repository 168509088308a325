"""Launchers of comparisons and logic. Bools are compared as the uint8 that they are in memory."""

from __future__ import annotations

from typing import Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.broadcasting import align
from gpunet.buffers import Buffer
from gpunet.cuda_kernels.broadcast import against_binary, binary_kernels, launch_binary
from gpunet.cuda_kernels.fill import constant_launch
from gpunet.cuda_kernels.pieces import Buffers, Launch, map_launch
from gpunet.cuda_kernels.signature import NUMBERS, Kernel
from gpunet.kernels import KernelContext, kernel

_COMPARE = binary_kernels("comparison", "compare", "T", "uint8", ", int32 holds", T=NUMBERS)
_LOGIC = binary_kernels("comparison", "logic", "uint8", "uint8", ", int32 table")
_NOT = Kernel("comparison", "not_fwd", "const uint8* x, uint8* y, int64 n")

#: For which of less (1), equal (2), greater (4) and none of these (8) a comparison holds.
_HOLDS: Final = {"EQ": 2, "NE": 13, "GT": 4, "GE": 6, "LT": 1, "LE": 3}
#: Bit ``2 a + b`` of the truth table.
_TABLES: Final = {"And": 0b1000, "Or": 0b1110, "Xor": 0b0110}


def _bytes(buffer: Buffer) -> Buffer:
    return buffer.view(buffer.shape, np.uint8) if buffer.dtype == np.bool_ else buffer


@kernel(*_HOLDS, device="cuda", binds=True, against=against_binary)
def compare(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Whether A and B compare as the operator says."""
    a, b, c = map(_bytes, (*inputs, *outputs))
    return launch_binary(ctx, _COMPARE, a, b, c, align(args, a.shape, b.shape), (_HOLDS[ctx.op.type],))


@kernel(*_TABLES, device="cuda", binds=True, against=against_binary)
def logic(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """A logical function of A and B."""
    a, b, c = map(_bytes, (*inputs, *outputs))
    return launch_binary(ctx, _LOGIC, a, b, c, align(args, a.shape, b.shape), (_TABLES[ctx.op.type],))


@kernel("Not", device="cuda", binds=True)
def logical_not(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """``Y = not X``."""
    return map_launch(ctx, _NOT, (_bytes(inputs[0]), _bytes(outputs[0])))


@kernel("IsEmpty", device="cuda", binds=True)
def is_empty(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Whether X has no elements."""
    return constant_launch(ctx, outputs[0], inputs[0].size == 0)

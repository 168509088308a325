"""Compression of gradient buckets: rounding with error feedback, PowerSGD, the largest elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import DataType, Float, Int, Ints
from gpunet.dtypes import is_half
from gpunet.errors import ArgumentError
from gpunet.operator import Operator
from gpunet.operators.bucket import CHAIN
from gpunet.rules import flops_per_input, want_shape, want_size
from gpunet.schema import Input, Output, Types, register
from gpunet.specs import BlobSpec, TensorSpec, spec

_SINGLE: Final[Types] = frozenset([spec((), "float32").dtype])
_PLACES: Final[Types] = frozenset([spec((), "int32").dtype])
_BUCKET: Final = Input("bucket", "gradients, scaled for the sum: N", _SINGLE)
_ERROR: Final = Input("error", "what earlier steps did not send: N", _SINGLE)
_NEW_ERROR: Final = Output("new_error", "what this step does not send: N")


def _want_vectors(op: Operator, inputs: Sequence[TensorSpec], *indices: int) -> None:
    for i in indices:
        want_shape(op, inputs, i, (inputs[0].size,), "as many elements as the bucket")


def _infer_round(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    _want_vectors(op, inputs, 0, 1)
    return [inputs[0].with_dtype(op.args.dtype), inputs[1]]


def _check_round(op: Operator) -> None:
    if not is_half(op.args.dtype):
        raise ArgumentError(f"argument 'dtype' is {op.args.dtype}, wanted float16 or bfloat16")


register(
    "RoundWithFeedback",
    inputs=[_BUCKET, _ERROR],
    outputs=[Output("rounded", "bucket + error in the half type: N"), _NEW_ERROR],
    enforce_inplace=[(1, 1)],
    args=[DataType("dtype", np.float16, "element type of rounded: float16 or bfloat16")],
    infer=_infer_round,
    check=_check_round,
    flops=flops_per_input(2),
    chain=CHAIN,
    doc="Rounds to a half type and keeps the rounding error for the next step. An element that overflows "
    "leaves no error. Source: F. Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014.",
)

_RANK: Final = Int("rank", 1, "columns of the factors, at least 1")
_ROWS: Final = Ints("rows", (), "rows of each tensor of the bucket, as a matrix")
_COLUMNS: Final = Ints("columns", (), "its columns; 0 where the tensor is sent as it is, with rows elements")


def matrices(args: Any) -> list[tuple[int, int, int]]:
    """Offset in the bucket, rows and columns of each matrix that is compressed."""
    found, begin = [], 0
    for rows, columns in zip(args.rows, args.columns, strict=True):
        if columns:
            found.append((begin, rows, columns))
        begin += rows * (columns or 1)
    return found


def plain_ranges(args: Any) -> list[tuple[int, int]]:
    """Begin and end in the bucket of what is sent as it is."""
    found, begin = [], 0
    for rows, columns in zip(args.rows, args.columns, strict=True):
        if not columns:
            found.append((begin, begin + rows))
        begin += rows * (columns or 1)
    return found


def _sizes(args: Any) -> tuple[int, int, int]:
    """Elements of the bucket, of what the first round sends, and of what the second does."""
    blocks = matrices(args)
    plain = sum(end - begin for begin, end in plain_ranges(args))
    total = plain + sum(rows * columns for _, rows, columns in blocks)
    left = plain + args.rank * sum(rows for _, rows, _ in blocks)
    return total, left, args.rank * sum(columns for _, _, columns in blocks)


def _check_power(op: Operator) -> None:
    args = op.args
    if args.rank < 1:
        raise ArgumentError(f"argument 'rank' is {args.rank}, wanted at least 1")
    if len(args.rows) != len(args.columns):
        raise ArgumentError(f"{len(args.rows)} rows and {len(args.columns)} columns, wanted equal numbers")
    if any(n < 0 for n in (*args.rows, *args.columns)):
        raise ArgumentError(f"rows {args.rows} and columns {args.columns}, wanted none below 0")


def _infer_left(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    total, left, right = _sizes(op.args)
    want_size(op, inputs, 0, total, "the elements of all matrices")
    _want_vectors(op, inputs, 1)
    want_size(op, inputs, 2, right)
    return [inputs[0], spec((left,), "float32")]


_POWER_ARGS: Final = (_RANK, _ROWS, _COLUMNS)
_SOURCE: Final = "Source: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, NeurIPS 2019, algorithm 1."
register(
    "PowerSgdLeft",
    inputs=[_BUCKET, _ERROR, Input("right", "right factors of the last step", _SINGLE)],
    outputs=[
        Output("bucket", "bucket + error, in place"),
        Output("left", "left factors M right of all matrices M, then the elements that are sent as they are"),
    ],
    args=_POWER_ARGS,
    enforce_inplace=[(0, 0)],
    check=_check_power,
    infer=_infer_left,
    flops=flops_per_input(2),
    chain=CHAIN,
    doc=f"The first half of a power iteration. {_SOURCE}",
)


def _infer_right(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    total, left, right = _sizes(op.args)
    want_size(op, inputs, 0, total, "the elements of all matrices")
    want_size(op, inputs, 1, left)
    _want_vectors(op, inputs, 2)
    want_size(op, inputs, 3, right)
    return [inputs[1], inputs[2], inputs[3]]


register(
    "PowerSgdRight",
    inputs=[
        Input("bucket", "of PowerSgdLeft: N", _SINGLE),
        Input("left", "of PowerSgdLeft, summed over the ranks", _SINGLE),
        _ERROR,
        Input("right", "right factors of the last step", _SINGLE),
    ],
    outputs=[
        Output("left", "with orthonormal columns, in place"),
        Output("new_error", "what the factors leave of this rank's bucket, in place"),
        Output("right", "right factors M^T left, in place"),
    ],
    args=_POWER_ARGS,
    enforce_inplace=[(1, 0), (2, 1), (3, 2)],
    check=_check_power,
    infer=_infer_right,
    flops=flops_per_input(4),
    chain=CHAIN,
    doc=f"The second half of a power iteration. {_SOURCE}",
)


def _infer_restore(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    total, left, right = _sizes(op.args)
    want_size(op, inputs, 0, left)
    want_size(op, inputs, 1, right)
    return [spec((total,), "float32")]


register(
    "PowerSgdRestore",
    inputs=[
        Input("left", "of PowerSgdRight", _SINGLE),
        Input("right", "of PowerSgdRight, summed over the ranks", _SINGLE),
    ],
    outputs=[Output("bucket", "left right^T of all matrices, and what was sent as it is")],
    args=_POWER_ARGS,
    check=_check_power,
    infer=_infer_restore,
    flops=flops_per_input(2),
    chain=CHAIN,
    doc=f"The sum of the gradients as it was compressed. {_SOURCE}",
)


def kept(size: int, ratio: float) -> int:
    """How many of ``size`` elements are sent."""
    return min(size, max(1, round(size * ratio)))


def _check_largest(op: Operator) -> None:
    if not 0 < op.args.ratio <= 1 or not 0 <= op.args.momentum < 1:
        raise ArgumentError(
            f"ratio is {op.args.ratio} and momentum {op.args.momentum}, wanted more than 0 up to 1, and 0 up "
            "to less than 1"
        )


def _infer_largest(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    _want_vectors(op, inputs, 0, 1, 2)
    count = kept(inputs[0].size, op.args.ratio) if inputs[0].size else 0
    return [spec((count,), "int32"), spec((count,), "float32"), inputs[1], inputs[2]]


register(
    "LargestElements",
    inputs=[
        _BUCKET,
        Input("velocity", "momentum of the gradients: N", _SINGLE),
        Input("error", "velocities that earlier steps did not send, summed: N", _SINGLE),
    ],
    outputs=[
        Output("places", "where the largest elements are, ascending: K"),
        Output("values", "those elements: K"),
        Output("new_velocity", "in place, 0 at those places"),
        Output("new_error", "in place, 0 at those places"),
    ],
    args=[
        Float("ratio", 0.01, "part of the elements that is sent, more than 0"),
        Float("momentum", 0.0, "part of the velocity that is kept"),
    ],
    enforce_inplace=[(1, 2), (2, 3)],
    check=_check_largest,
    infer=_infer_largest,
    flops=flops_per_input(3),
    chain=CHAIN,
    doc="``velocity' = momentum velocity + bucket``, ``error' = error + velocity'``; the elements of error' "
    "with the largest absolute values are sent. Momentum is corrected for what waits here, so the optimizer "
    "must have none. Source: Y. Lin et al., Deep Gradient Compression, ICLR 2018.",
)


def _check_size(op: Operator) -> None:
    if op.args.size < 0:
        raise ArgumentError(f"argument 'size' is {op.args.size}, wanted 0 or more")


def _infer_spread(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_size(op, inputs, 1, inputs[0].size, "a value for each place")
    return [spec((op.args.size,), "float32")]


register(
    "SumElementsAtPlaces",
    inputs=[
        Input("places", "of all ranks", _PLACES),
        Input("values", "of all ranks", _SINGLE),
    ],
    outputs=[Output("bucket", "zeros, plus each value at its place")],
    args=[Int("size", 0, "elements of the bucket")],
    check=_check_size,
    infer=_infer_spread,
    flops=flops_per_input(1),
    chain=CHAIN,
    doc="The sum of what LargestElements sends on all ranks. Values are added in their order.",
)

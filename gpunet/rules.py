"""Shape rules and costs that many operators share, for the ``infer`` and ``flops`` fields of schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError, ShapeError
from gpunet.operator import Operator
from gpunet.schema import FlopsFunction, InferFunction
from gpunet.specs import BlobSpec, Shape, TensorSpec, format_shape


def same_as(*indices: int) -> InferFunction:
    """Output ``k`` has the shape and type of the input that the ``k``-th index names."""

    def infer(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
        return [inputs[i] for i in indices]

    return infer


#: The single output looks like input 0.
same_as_input = same_as(0)


def describe(op: Operator, index: int, spec: TensorSpec) -> str:
    """``input X (float32 8x3x4x4)``: how messages name an input; one of any number with its blob."""
    blob = f"{op.inputs[index]!r}, " if op.schema.input_at(index).variadic else ""
    return f"input {op.schema.input_label(index)} ({blob}{spec})"


def want_rank(op: Operator, inputs: Sequence[TensorSpec], index: int, *ranks: int) -> None:
    """Raises :class:`ShapeError` unless input ``index`` has one of ``ranks`` dimensions."""
    if inputs[index].rank not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ShapeError(
            f"{describe(op, index, inputs[index])} has {inputs[index].rank} dimensions, wanted {wanted}"
        )


def want_shape(op: Operator, inputs: Sequence[TensorSpec], index: int, shape: Shape, why: str = "") -> None:
    """Raises :class:`ShapeError` unless input ``index`` has exactly this shape."""
    if inputs[index].shape != tuple(shape):
        reason = f" ({why})" if why else ""
        raise ShapeError(
            f"{describe(op, index, inputs[index])} does not fit, wanted {format_shape(tuple(shape))}{reason}"
        )


def want_size(op: Operator, inputs: Sequence[TensorSpec], index: int, size: int, why: str = "") -> None:
    """Raises :class:`ShapeError` unless input ``index`` has this number of elements."""
    if inputs[index].size != size:
        reason = f" ({why})" if why else ""
        raise ShapeError(
            f"{describe(op, index, inputs[index])} has {inputs[index].size} elements, wanted {size}{reason}"
        )


def want_same_type(op: Operator, inputs: Sequence[TensorSpec], *indices: int) -> None:
    """Raises :class:`DataTypeError` unless the inputs (all of them, where no index is given) have one element
    type.
    """
    chosen = list(indices or range(len(inputs)))
    first = inputs[chosen[0]]
    for i in chosen[1:]:
        if inputs[i].dtype != first.dtype:
            raise DataTypeError(
                f"{describe(op, i, inputs[i])} differs in type from {describe(op, chosen[0], first)}, wanted "
                "one type"
            )


def same_as_both(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    """The output has the shape and type that the two inputs must have in common; raises
    :class:`DataTypeError` or :class:`ShapeError` where they differ.
    """
    want_same_type(op, inputs)
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of the first input")
    return [inputs[0]]


def canonical_axis(axis: int, rank: int, name: str = "axis", *, inclusive: bool = False) -> int:
    """``axis`` counted from the front, where negative values count from the end; raises
    :class:`ArgumentError` out of range.

    With ``inclusive``, ``rank`` itself is allowed too (an insertion point).
    """
    limit = rank + 1 if inclusive else rank
    if not -limit <= axis < limit:
        raise ArgumentError(
            f"argument {name!r} is {axis}, wanted {-limit} to {limit - 1} for {rank} dimensions"
        )
    return axis + limit if axis < 0 else axis


def broadcast_shapes(a: Shape, b: Shape) -> Shape:
    """The shape of NumPy broadcasting; raises :class:`ShapeError` where it does not exist."""
    try:
        return tuple(int(n) for n in np.broadcast_shapes(a, b))
    except ValueError:
        raise ShapeError(
            f"shapes {format_shape(a)} and {format_shape(b)} do not broadcast, wanted equal or 1 from the "
            "right"
        ) from None


def flops_per_output(count: int = 1) -> FlopsFunction:
    """``count`` operations for each element of output 0."""

    def flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        return count * outputs[0].size

    return flops


def flops_per_input(count: int = 1, index: int = 0) -> FlopsFunction:
    """``count`` operations for each element of one input."""

    def flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        return count * inputs[index].size

    return flops

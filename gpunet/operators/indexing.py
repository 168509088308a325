"""Indexing: Gather and its inverse, TopK, ArgMax, ArgMin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.arguments import Bool, Int
from gpunet.errors import ArgumentError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import (
    canonical_axis,
    describe,
    flops_per_input,
    want_rank,
    want_same_type,
    want_shape,
    want_size,
)
from gpunet.schema import FLOATS, INDICES, NUMBERS, Input, Output, register
from gpunet.specs import TensorSpec

_INT64: Final = np.dtype(np.int64)


def gather_axis(op: Operator, rank: int) -> int:
    """The dimension that Gather, BatchGather and BatchGatherGradient index, counted from the front."""
    return canonical_axis(1 if op.type == "BatchGather" else op.args.axis, rank)


def gather_wraps(op: Operator) -> bool:
    """Whether negative indices count from the end: as the argument says, else in Gather of dimension 0."""
    if op.args.wrap_indices is not None:
        return bool(op.args.wrap_indices)
    return op.type == "Gather" and op.args.axis == 0


def _infer_gather(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    data, indices = inputs[0], inputs[1]
    axis = gather_axis(op, data.rank)
    if op.args.match_outer and indices.shape[:axis] != data.shape[:axis]:
        raise ShapeError(
            f"{describe(op, 1, indices)} does not fit {describe(op, 0, data)}, "
            f"wanted equal sizes before dimension {axis} (match_outer)"
        )
    if data.shape[axis] == 0:
        # Nothing to take: Caffe2 hands the empty tensor on, whatever the indices are.
        return [data]
    picked = indices.shape[axis:] if op.args.match_outer else indices.shape
    return [data.with_shape(*data.shape[:axis], *picked, *data.shape[axis + 1 :])]


def _gather_gradient(g: GradientBuilder) -> list[OperatorDef]:
    if g.args.axis != 0:
        return g.single(
            "BatchGatherGradient",
            [g.input(0), g.input(1), g.output_grad(0)],
            [g.input_grad(0)],
            axis=g.args.axis,
        )
    if g.args.dense_gradient:
        return g.single("SparseToDense", [g.input(1), g.output_grad(0), g.input(0)], [g.input_grad(0)])
    g.set_sparse(0, g.input(1), g.output_grad(0))
    return []


def _batch_gather_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("BatchGatherGradient", [g.input(0), g.input(1), g.output_grad(0)], [g.input_grad(0)])


_MATCH_OUTER: Final = Bool(
    "match_outer", False, "the dimensions before axis are the same in data and indices"
)
_WRAP: Final = Bool(
    "wrap_indices", None, "negative indices count from the end; by default only where axis is 0"
)

register(
    "Gather",
    inputs=[
        Input("data", "tensor of at least one dimension"),
        Input("indices", "tensor of any shape", INDICES),
    ],
    outputs=[Output("Y", "shape of data with dimension axis replaced by the shape of indices")],
    args=[
        Int("axis", 0, "the dimension to index"),
        _MATCH_OUTER,
        _WRAP,
        Bool("dense_gradient", False, "make the gradient dense, not a pair of indices and values"),
    ],
    infer=_infer_gather,
    gradient=_gather_gradient,
    doc="Takes parts of a tensor: ``Y = data[indices]`` for axis 0.",
)
register(
    "BatchGather",
    inputs=[
        Input("data", "tensor of at least two dimensions"),
        Input("indices", "tensor of any shape", INDICES),
    ],
    outputs=[Output("Y", "shape of data with dimension 1 replaced by the shape of indices")],
    args=[_MATCH_OUTER, _WRAP],
    infer=_infer_gather,
    gradient=_batch_gather_gradient,
    doc="Takes parts of each element of a batch: ``Y = data[:, indices]``.",
)


def _infer_batch_gather_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    want_same_type(op, inputs, 0, 2)
    want_shape(op, inputs, 2, _infer_gather(op, inputs)[0].shape, "the shape of the forward output")
    return [inputs[0]]


register(
    "BatchGatherGradient",
    inputs=[
        Input("data", "first input of the forward operator", FLOATS),
        Input("indices", "second input of the forward operator", INDICES),
        Input("dY", "gradient of Y", FLOATS),
    ],
    outputs=[Output("ddata", "gradient of data")],
    args=[Int("axis", 1, "the dimension that was indexed"), _MATCH_OUTER, _WRAP],
    infer=_infer_batch_gather_gradient,
    flops=flops_per_input(1, 2),
    doc="Sums dY at the places that its parts were taken from.",
)


def _infer_sparse_to_dense(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    indices, values = inputs[0], inputs[1]
    block = values.shape[indices.rank :]
    if values.shape[: indices.rank] != indices.shape:
        raise ShapeError(
            f"{describe(op, 1, values)} does not fit {describe(op, 0, indices)}, wanted a row an index"
        )
    if len(inputs) == 3:
        if inputs[2].shape[1:] != block or inputs[2].rank == 0:
            raise ShapeError(
                f"{describe(op, 2, inputs[2])} does not fit {describe(op, 1, values)}, wanted equal rows"
            )
        return [values.with_shape(inputs[2].shape[0], *block)]
    first = op.args.output_first_dim
    return [values.with_shape(first, *block) if first > 0 else None]


def _sparse_to_dense_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("Gather", [g.output_grad(0), g.input(0)], [g.input_grad(1)])


register(
    "SparseToDense",
    inputs=[
        Input("indices", "rows that the values belong to, none negative", INDICES),
        Input("values", "a row for each index", NUMBERS),
        Input("like", "tensor whose number of rows Y gets", optional=True),
    ],
    outputs=[Output("Y", "tensor with the sums of the values in its rows")],
    args=[
        Int("output_first_dim", 0, "number of rows of Y; without it and without like, the largest index + 1")
    ],
    infer=_infer_sparse_to_dense,
    gradient=_sparse_to_dense_gradient,
    dynamic=lambda op: len(op.inputs) == 2 and op.args.output_first_dim <= 0,
    flops=flops_per_input(1, 1),
    doc="Sums rows at indices: ``Y[indices[i]] += values[i]``.",
)


def _infer_top_k(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec | None]:
    x = inputs[0]
    axis = canonical_axis(op.args.axis, x.rank)
    if len(inputs) == 2:
        want_size(op, inputs, 1, 1)
        return [None] * len(op.outputs)
    values = x.with_shape(*x.shape[:axis], op.args.k, *x.shape[axis + 1 :])
    return [values, values.with_dtype(_INT64), TensorSpec((values.size,), _INT64)]


def _check_top_k(op: Operator) -> None:
    if len(op.inputs) == 1 and op.args.k < 1:
        raise ArgumentError(f"argument 'k' is {op.args.k}, wanted 1 or more, or an input k")


def _top_k_gradient(g: GradientBuilder) -> list[OperatorDef]:
    return g.single("TopKGradient", [g.output_grad(0), g.output(1), g.input(0)], [g.input_grad(0)])


register(
    "TopK",
    inputs=[
        Input("X", "tensor of at least one dimension", NUMBERS),
        Input("k", "one element, instead of argument k", INDICES, optional=True),
    ],
    outputs=[
        Output(
            "values",
            "the k largest values along the axis, largest first; 0 behind the last where there are fewer",
        ),
        Output("indices", "int64: their indices along the axis; -1 where there is none"),
        Output(
            "flat_indices", "int64 vector: their indices in all of X; -1 where there is none", optional=True
        ),
    ],
    args=[Int("k", 0, "how many values"), Int("axis", -1, "the dimension")],
    infer=_infer_top_k,
    check=_check_top_k,
    gradient=_top_k_gradient,
    dynamic=lambda op: len(op.inputs) == 2,
    doc="The largest values along a dimension; of equal ones the first comes first; NaN is the largest.",
)


def _infer_top_k_gradient(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    want_shape(op, inputs, 1, inputs[0].shape, "the shape of dvalues")
    want_same_type(op, inputs, 0, 2)
    want_rank(op, inputs, 2, inputs[0].rank)
    canonical_axis(op.args.axis, inputs[2].rank)
    return [inputs[2]]


register(
    "TopKGradient",
    inputs=[
        Input("dvalues", "gradient of values", FLOATS),
        Input("indices", "second output of the forward operator", INDICES),
        Input("X", "input of the forward operator", FLOATS),
    ],
    outputs=[Output("dX", "gradient of X")],
    args=[Int("axis", -1, "the dimension")],
    infer=_infer_top_k_gradient,
    doc="dvalues at the places of the values, 0 elsewhere.",
)


def _infer_arg(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    x = inputs[0]
    axis = canonical_axis(op.args.axis, x.rank)
    kept = (1,) if op.args.keepdims else ()
    found = TensorSpec((*x.shape[:axis], *kept, *x.shape[axis + 1 :]), _INT64)
    if x.shape[axis] == 0 and found.size:
        raise ShapeError(f"{describe(op, 0, x)} is empty along dimension {axis}, wanted at least one element")
    return [found]


for _type, _what in (("ArgMax", "largest"), ("ArgMin", "smallest")):
    register(
        _type,
        inputs=[Input("X", "tensor of at least one dimension", NUMBERS)],
        outputs=[Output("indices", "int64 tensor")],
        args=[
            Int("axis", -1, "the dimension"),
            Bool("keepdims", True, "keep the dimension, with size 1"),
        ],
        infer=_infer_arg,
        flops=flops_per_input(),
        doc=f"Index of the {_what} value along a dimension; the first of equal ones.",
    )

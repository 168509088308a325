"""Matrix products: FC, FCTransposed, MatMul, BatchMatMul and the gradients of the fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpunet.arguments import Bool, Int
from gpunet.errors import GradientError, ShapeError
from gpunet.gradient_maker import GradientBuilder
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import broadcast_shapes, canonical_axis, describe, want_same_type, want_shape, want_size
from gpunet.schema import FLOATS, Input, Output, register
from gpunet.specs import Shape, TensorSpec, format_shape

#: Arguments of the fully connected layers.
FC_ARGS: Final = [
    Int("axis", 1, "X is taken as a matrix with the dimensions before this one as rows"),
    Int("axis_w", 1, "W is taken as a matrix in the same way"),
    Bool("no_gradient_to_input", False, "make no gradient of X (for the first layer of a net)"),
]


def as_matrix(shape: Shape, axis: int) -> tuple[int, int]:
    """Rows and columns of a tensor whose dimensions from ``axis`` on are joined to the columns."""
    return math.prod(shape[:axis]), math.prod(shape[axis:])


def _fc_sizes(op: Operator, inputs: Sequence[TensorSpec]) -> tuple[int, int, int, int]:
    """The axis of X, and M, K, N of the product (M x K) (K x N); ShapeError where X and W do not fit."""
    x, w = inputs[0], inputs[1]
    axis = canonical_axis(op.args.axis, x.rank)
    rows, columns = as_matrix(w.shape, canonical_axis(op.args.axis_w, w.rank, "axis_w"))
    n, wanted = (columns, rows) if "FCTransposed" in op.type else (rows, columns)
    m, k = as_matrix(x.shape, axis)
    if k != wanted:
        raise ShapeError(
            f"{describe(op, 0, x)} has {k} features from axis {axis} on, {describe(op, 1, w)} wants {wanted}"
        )
    return axis, m, k, n


def infer_fc(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The spec of Y, from those of X, W and b."""
    want_same_type(op, inputs)
    axis, _, _, n = _fc_sizes(op, inputs)
    want_shape(op, inputs, 2, (n,), "one bias for each output feature")
    return [inputs[0].with_shape(*inputs[0].shape[:axis], n)]


def _infer_fc_gradient(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    _, m, _, n = _fc_sizes(op, inputs)
    want_size(op, inputs, 2, m * n, f"{m} rows of {n} features")
    return [inputs[1], inputs[1].with_shape(n), inputs[0]]


def fc_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Floating-point operations of Y."""
    _, m, k, n = _fc_sizes(op, inputs)
    return 2 * m * k * n + m * n


def _fc_gradient_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    _, m, k, n = _fc_sizes(op, inputs)
    return 2 * m * k * n * (len(op.outputs) - 1) + m * n


def _fc_gradient(g: GradientBuilder) -> list[OperatorDef]:
    outputs = [g.input_grad(1), g.input_grad(2)]
    if not g.args.no_gradient_to_input:
        outputs.append(g.input_grad(0))
    return g.single(f"{g.op.type}Gradient", [g.input(0), g.input(1), g.output_grad(0)], outputs)


def _fully_connected(type: str, weights: str, formula: str) -> None:
    register(
        type,
        inputs=[
            Input("X", "features, the dimensions before `axis` are rows: M x K", FLOATS),
            Input("W", f"weights: {weights}", FLOATS),
            Input("b", "bias: N", FLOATS),
        ],
        outputs=[Output("Y", "the dimensions of X before `axis`, then N")],
        args=FC_ARGS,
        infer=infer_fc,
        gradient=_fc_gradient,
        flops=fc_flops,
        doc=f"Fully connected layer, ``Y = {formula} + b``.",
    )
    register(
        f"{type}Gradient",
        inputs=[
            Input("X", "features: M x K", FLOATS),
            Input("W", f"weights: {weights}", FLOATS),
            Input("dY", "gradient of Y: M x N", FLOATS),
        ],
        outputs=[
            Output("dW", "gradient of W"),
            Output("db", "gradient of b: N"),
            Output("dX", "gradient of X", optional=True),
        ],
        args=FC_ARGS,
        infer=_infer_fc_gradient,
        flops=_fc_gradient_flops,
        doc=f"Gradients of {type}.",
    )


_fully_connected("FC", "N x K", "X W^T")
_fully_connected("FCTransposed", "K x N", "X W")


def _matmul_sizes(op: Operator, inputs: Sequence[TensorSpec]) -> tuple[int, int, int]:
    """M, K, N of the product of the two matrices, after the transpositions."""
    a = as_matrix(inputs[0].shape, canonical_axis(op.args.axis_a, inputs[0].rank, "axis_a"))
    b = as_matrix(inputs[1].shape, canonical_axis(op.args.axis_b, inputs[1].rank, "axis_b"))
    m, k = a[::-1] if op.args.trans_a else a
    wanted, n = b[::-1] if op.args.trans_b else b
    if k != wanted:
        raise ShapeError(
            f"{describe(op, 0, inputs[0])} is a matrix with {k} columns, {describe(op, 1, inputs[1])} one "
            f"with {wanted} "
            "rows, wanted equal numbers"
        )
    return m, k, n


def _infer_matmul(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs, 0, 1)
    m, _, n = _matmul_sizes(op, inputs)
    if len(inputs) < 3:
        return [inputs[0].with_shape(m, n)]
    want_size(op, inputs, 2, m * n, f"the output is {m}x{n}")
    return [inputs[0].with_shape(*inputs[2].shape)]


def _matmul_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    m, k, n = _matmul_sizes(op, inputs)
    return 2 * m * k * n


def _matmul_gradient(g: GradientBuilder) -> list[OperatorDef]:
    # The third input gives the gradients the shapes of A and B, which may have more than two dimensions. As
    # in Caffe2 the axis is always 1: where the forward operator splits a factor elsewhere, with more than
    # ones between, the gradient is a ShapeError.
    g.copy_arguments = False
    a, b, dy = g.input(0), g.input(1), g.output_grad(0)
    da, db = g.input_grad(0), g.input_grad(1)
    if g.args.trans_a and g.args.trans_b:
        return [
            g.make("MatMul", [b, dy, a], [da], trans_a=1, trans_b=1, axis_a=1),
            g.make("MatMul", [dy, a, b], [db], trans_a=1, trans_b=1, axis_b=1),
        ]
    if g.args.trans_a:
        return [
            g.make("MatMul", [b, dy, a], [da], trans_b=1, axis_a=1),
            g.make("MatMul", [a, dy, b], [db], axis_a=1),
        ]
    if g.args.trans_b:
        return [
            g.make("MatMul", [dy, b, a], [da], axis_b=1),
            g.make("MatMul", [dy, a, b], [db], trans_a=1, axis_b=1),
        ]
    return [
        g.make("MatMul", [dy, b, a], [da], trans_b=1, axis_b=1),
        g.make("MatMul", [a, dy, b], [db], trans_a=1, axis_a=1),
    ]


register(
    "MatMul",
    inputs=[
        Input("A", "left factor, the dimensions before `axis_a` are rows", FLOATS),
        Input("B", "right factor, the dimensions before `axis_b` are rows", FLOATS),
        Input("shape_like", "a tensor whose shape the output takes", optional=True),
    ],
    outputs=[Output("Y", "M x N, or the shape of the third input")],
    args=[
        Int("axis_a", 1, "first dimension of A that belongs to the columns"),
        Int("axis_b", 1, "first dimension of B that belongs to the columns"),
        Bool("trans_a", False, "transpose A after that"),
        Bool("trans_b", False, "transpose B after that"),
    ],
    infer=_infer_matmul,
    gradient=_matmul_gradient,
    flops=_matmul_flops,
    doc="Product of two matrices, ``Y = op(A) op(B)``. The gradient needs `axis_a` and `axis_b` to be 1, "
    "or what lies between to be ones.",
)


def _infer_batch_matmul(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    a, b = inputs
    for i, found in enumerate(inputs):
        if found.rank == 0:
            raise ShapeError(f"{describe(op, i, found)} has 0 dimensions, wanted at least 1")
    m, k, wanted, n = _batch_sizes(op, inputs)
    if k != wanted:
        raise ShapeError(
            f"{describe(op, 0, a)} has {k} columns after transposition, {describe(op, 1, b)} {wanted} "
            "rows, wanted equal numbers"
        )
    if not op.args.broadcast and a.shape[:-2] != b.shape[:-2] and 1 not in (a.rank, b.rank):
        raise ShapeError(
            f"{describe(op, 0, a)} and {describe(op, 1, b)} differ in batch dimensions, "
            "wanted equal ones or broadcast=1"
        )
    batch = _broadcast(op, inputs)
    if a.rank == 1 and b.rank == 1:
        return [a.with_shape(1)]
    return [a.with_shape(*batch, *([] if a.rank == 1 else [m]), *([] if b.rank == 1 else [n]))]


def _batch_sizes(op: Operator, inputs: Sequence[TensorSpec]) -> tuple[int, int, int, int]:
    """M and K of the matrices in A, K and N of those in B; a vector is a row in A, a column in B."""
    a, b = inputs[0].shape, inputs[1].shape
    m, k = (1, a[0]) if len(a) == 1 else (a[-1], a[-2]) if op.args.trans_a else (a[-2], a[-1])
    rows, n = (b[0], 1) if len(b) == 1 else (b[-1], b[-2]) if op.args.trans_b else (b[-2], b[-1])
    return m, k, rows, n


def _broadcast(op: Operator, inputs: Sequence[TensorSpec]) -> Shape:
    """The batch dimensions of the output, by NumPy's rule."""
    try:
        return broadcast_shapes(inputs[0].shape[:-2], inputs[1].shape[:-2])
    except ShapeError:
        raise ShapeError(
            f"{describe(op, 0, inputs[0])} and {describe(op, 1, inputs[1])} have batch dimensions "
            f"{format_shape(inputs[0].shape[:-2])} and {format_shape(inputs[1].shape[:-2])}, wanted equal "
            "ones or 1 from the right"
        ) from None


def _batch_matmul_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return 2 * outputs[0].size * _batch_sizes(op, inputs)[1]


def _batch_matmul_gradient(g: GradientBuilder) -> list[OperatorDef]:
    if g.args.broadcast:
        raise GradientError(
            "there is no gradient with broadcast=1, wanted factors with equal batch dimensions"
        )
    g.copy_arguments = False
    a, b, dy = g.input(0), g.input(1), g.output_grad(0)
    da, db = g.input_grad(0), g.input_grad(1)
    if g.args.trans_a and g.args.trans_b:
        return [
            g.make("BatchMatMul", [b, dy], [da], trans_a=1, trans_b=1),
            g.make("BatchMatMul", [dy, a], [db], trans_a=1, trans_b=1),
        ]
    if g.args.trans_a:
        return [g.make("BatchMatMul", [b, dy], [da], trans_b=1), g.make("BatchMatMul", [a, dy], [db])]
    if g.args.trans_b:
        return [g.make("BatchMatMul", [dy, b], [da]), g.make("BatchMatMul", [dy, a], [db], trans_a=1)]
    return [g.make("BatchMatMul", [dy, b], [da], trans_b=1), g.make("BatchMatMul", [a, dy], [db], trans_a=1)]


register(
    "BatchMatMul",
    inputs=[
        Input("A", "left factors: batch dimensions, then M x K", FLOATS),
        Input("B", "right factors: batch dimensions, then K x N", FLOATS),
    ],
    outputs=[
        Output("Y", "products: batch dimensions, then M x N; a factor that is a vector adds no dimension")
    ],
    args=[
        Bool("trans_a", False, "transpose the last two dimensions of A"),
        Bool("trans_b", False, "transpose the last two dimensions of B"),
        Bool(
            "broadcast", False, "broadcast the batch dimensions by NumPy's rule (there is no gradient then)"
        ),
    ],
    infer=_infer_batch_matmul,
    gradient=_batch_matmul_gradient,
    flops=_batch_matmul_flops,
    doc="Products of matrices in a batch, ``Y[i] = op(A[i]) op(B[i])``.",
)

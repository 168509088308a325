"""Buckets of gradients for data parallelism: many tensors in one buffer and back; sparse gradients of all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpunet.arguments import DataType
from gpunet.errors import DataTypeError, SchemaError
from gpunet.operator import Operator
from gpunet.rules import flops_per_output, want_same_type, want_size
from gpunet.schema import ALL_INPLACE, FLOATS, INDICES, Input, Output, Types, register
from gpunet.specs import BlobSpec, TensorSpec, spec

#: Bucket work runs on the lane of the collectives, so that it waits for them and the backward pass does not.
CHAIN: Final = "collective"
_SINGLE: Final[Types] = frozenset([spec((), "float32").dtype])
_FACTOR: Final = Input("factor", "what each element is multiplied with; one element, 0 makes zeros", _SINGLE)


def _infer_pack(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_size(op, inputs, 0, 1)
    first = inputs[1].dtype
    for found in inputs[2:]:
        if found.dtype != first:
            raise DataTypeError(f"tensors are {first} and {found.dtype}, wanted one element type in a bucket")
    wanted = first if op.args.dtype is None else op.args.dtype
    if wanted not in FLOATS:
        names = ", ".join(sorted(t.name for t in FLOATS))
        raise DataTypeError(f"argument 'dtype' is {wanted}, wanted one of {names}")
    return [spec((sum(s.size for s in inputs[1:]),), wanted)]


register(
    "PackBucket",
    inputs=[_FACTOR, Input("tensor", "tensors of one type", FLOATS, variadic=True)],
    outputs=[Output("bucket", "all elements, one tensor behind the other")],
    args=[DataType("dtype", None, "element type of the bucket; that of the tensors without it")],
    infer=_infer_pack,
    flops=flops_per_output(),
    chain=CHAIN,
    packs=1,
    doc="Copies tensors one behind the other into a bucket, times a factor, which is applied before the "
    "elements are rounded to the bucket's type. With the factor 0 the tensors are not read: a rank without "
    "samples, whose mean gradient is 0/0, adds nothing.",
)


def _check_unpack(op: Operator) -> None:
    if op.outputs != op.inputs[1:]:
        raise SchemaError(f"outputs {list(op.outputs)} must be in place of inputs {list(op.inputs[1:])}")


def _infer_unpack(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_size(op, inputs, 0, sum(s.size for s in inputs[1:]), "the elements of all tensors")
    first = inputs[1].dtype
    for found in inputs[2:]:
        if found.dtype != first:
            raise DataTypeError(f"tensors are {first} and {found.dtype}, wanted one element type in a bucket")
    return list(inputs[1:])


register(
    "UnpackBucket",
    inputs=[
        Input("bucket", "made by PackBucket of these tensors", FLOATS),
        Input("tensor", "tensors of one type, for their shapes", FLOATS, variadic=True, shape_only=True),
    ],
    outputs=[Output("tensor", "the tensors, in place", variadic=True)],
    infer=_infer_unpack,
    inplace=ALL_INPLACE,
    check=_check_unpack,
    chain=CHAIN,
    doc="The inverse of PackBucket: overwrites the tensors with the elements of the bucket.",
)


def _infer_drain(op: Operator, inputs: Sequence[TensorSpec]) -> list[BlobSpec]:
    want_same_type(op, inputs)
    want_size(op, inputs, 1, inputs[0].size, "the elements of the bucket")
    return [inputs[0], inputs[1]]


register(
    "DrainBucket",
    inputs=[
        Input("bucket", "of this micro-batch", FLOATS),
        Input("gathered", "the sum of those of earlier micro-batches", FLOATS),
    ],
    outputs=[
        Output("bucket", "bucket + gathered, in place"),
        Output("gathered", "zeros, in place"),
    ],
    enforce_inplace=[(0, 0), (1, 1)],
    infer=_infer_drain,
    flops=flops_per_output(),
    chain=CHAIN,
    doc="Adds what was gathered to the bucket and starts gathering anew.",
)


def _infer_gather(op: Operator, inputs: Sequence[BlobSpec | None]) -> list[BlobSpec | None]:
    return [None, None]


register(
    "AllgatherSlices",
    inputs=[
        _FACTOR,
        Input("indices", "rows that this rank has gradients of: K", INDICES),
        Input("values", "the gradients: K x any dimensions", FLOATS),
    ],
    outputs=[
        Output("all_indices", "the indices of all ranks, one rank behind the other"),
        Output("all_values", "their values, each rank's times its factor"),
    ],
    infer=_infer_gather,
    dynamic=True,
    chain=CHAIN,
    doc="The sum of sparse gradients over the ranks, as the slices of all of them. Ranks may have different "
    "numbers of rows, also none.",
)

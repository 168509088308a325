"""Collectives: operators that all ranks of a job run together, in one order.

Allreduce, Broadcast, Allgather, ReduceScatter, Barrier, the common worlds that Caffe2 makes for them, and the
NCCL operators. They use the communicator of the process (:func:`gpunet.distributed.world`), or that of a
common world which is given as the first input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Arg, Bool, Int, Str
from gpunet.errors import ArgumentError, DataTypeError, SchemaError, ShapeError
from gpunet.operator import Operator
from gpunet.rules import want_same_type, want_shape
from gpunet.schema import NUMBERS, Input, Output, register
from gpunet.specs import BlobSpec, OpaqueSpec, TensorSpec, format_shape

CHAIN: Final = "collective"
_OP: Final = Str("op", "sum", "how tensors are combined", choices=("sum", "mean", "max", "min"))
_AVERAGE: Final = Bool("average", False, "the mean in place of the sum")
_ROOT: Final = Int("root", 0, "rank whose tensor counts; with several inputs and no common world, the input")
_SIZE: Final = Int("size", 0, "number of ranks; by default that of the running job")
_X: Final = Input(
    "X", "tensors of one shape and type, possibly behind a common world", types=None, variadic=True
)
#: Kernels read all inputs before they write, so the pairs hold with and without a common world.
_IN_PLACE: Final = [(i + shift, i) for i in range(64) for shift in (0, 1)]


def has_world(inputs: Sequence[Any]) -> bool:
    """Whether the first of some specs is that of a common world."""
    return bool(inputs) and isinstance(inputs[0], OpaqueSpec)


def tensors_of(op: Operator, inputs: Sequence[Any]) -> list[TensorSpec]:
    """The inputs behind the common world, if there is one; raises unless they are numbers of one shape and
    type.
    """
    first = int(has_world(inputs))
    found = list(inputs[first:])
    if not found:
        raise SchemaError("has a common world and no tensor, wanted at least one tensor")
    for index in range(first, len(inputs)):
        spec = inputs[index]
        if not isinstance(spec, TensorSpec) or spec.dtype not in NUMBERS:
            raise DataTypeError(f"input {index} ({op.inputs[index]!r}) is {spec}, wanted a tensor of numbers")
        want_same_type(op, inputs, first, index)
        want_shape(op, inputs, index, found[0].shape, f"the shape of {op.inputs[first]!r}")
    return found


def job_size(op: Operator) -> int:
    """Number of ranks that an operator counts on: its argument, else that of the running job."""
    declared = int(getattr(op.args, "size", 0))
    if declared < 0:
        raise ArgumentError(f"argument 'size' is {declared}, wanted 0 (that of the job) or more")
    if declared:
        return declared
    from gpunet import distributed

    return distributed.world().size


def _check_mean(op: Operator, specs: Sequence[TensorSpec]) -> None:
    if (op.args.average or op.args.op == "mean") and specs[0].dtype.kind in "iu":
        raise DataTypeError(f"a mean of {specs[0].dtype.name} would be rounded, wanted a floating type")


def _check_one_to_one(op: Operator) -> None:
    if len(op.inputs) - len(op.outputs) not in (0, 1):
        raise SchemaError(
            f"has {len(op.inputs)} inputs and {len(op.outputs)} outputs, wanted an output for each tensor"
        )


def _infer_one_to_one(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    found = tensors_of(op, inputs)
    if len(found) != len(op.outputs):
        raise SchemaError(f"has {len(found)} tensors and {len(op.outputs)} outputs, wanted one for each")
    if "op" in op.schema.arg_table:
        _check_mean(op, found)
    return list(found)


def _one_to_one(type: str, args: Sequence[Arg], doc: str) -> None:
    register(
        type,
        inputs=[_X],
        outputs=[Output("Y", "tensor of the shape and type of X", variadic=True)],
        args=args,
        inplace=_IN_PLACE,
        check=_check_one_to_one,
        infer=_infer_one_to_one,
        chain=CHAIN,
        doc=doc,
    )


_one_to_one(
    "Allreduce",
    [_OP, _AVERAGE],
    "Combines X of all ranks, and all X of a rank: each Y on each rank becomes the same sum (mean, maximum, "
    "minimum). Sums of float16 are made in float32 and rounded once.",
)
_one_to_one("Broadcast", [_ROOT], "Each Y on each rank becomes the first X of rank ``root``.")
_one_to_one(
    "NCCLAllreduce",
    [_OP, _AVERAGE],
    "With several X: each Y becomes their sum, in this process alone. With one: Y becomes the sum of X of "
    "all ranks.",
)
_one_to_one(
    "NCCLBroadcast",
    [_ROOT],
    "With several X: each Y becomes X number ``root``. With one: Y becomes X of rank ``root``.",
)


def _infer_reduce(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    found = tensors_of(op, inputs)
    _check_mean(op, found)
    return [found[0]]


register(
    "NCCLReduce",
    inputs=[_X],
    outputs=[Output("Y", "tensor of the shape and type of X")],
    args=[_ROOT, _OP, _AVERAGE],
    inplace=_IN_PLACE + [(i, 0) for i in range(2, 64)],
    infer=_infer_reduce,
    chain=CHAIN,
    doc="With several X: Y becomes their sum. With one: Y on rank ``root`` becomes the sum of X of all "
    "ranks, and holds anything on the others.",
)


def _infer_all_gather(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    found = tensors_of(op, inputs)
    return [found[0].with_shape(len(found) * found[0].size * job_size(op))]


register(
    "Allgather",
    inputs=[_X],
    outputs=[Output("Y", "vector of all elements")],
    args=[_SIZE],
    infer=_infer_all_gather,
    chain=CHAIN,
    doc="Y on each rank holds the elements of all X of rank 0, then those of rank 1, and so on.",
)


def _infer_nccl_gather(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    found = tensors_of(op, inputs)
    parts = len(found) if len(found) > 1 else job_size(op)
    if len(op.outputs) != len(found):
        raise SchemaError(f"has {len(found)} tensors and {len(op.outputs)} outputs, wanted one for each")
    return [s.with_shape(parts, *s.shape) for s in found]


register(
    "NCCLAllGather",
    inputs=[_X],
    outputs=[Output("Y", "tensor with one more dimension, in front", variadic=True)],
    args=[_SIZE],
    infer=_infer_nccl_gather,
    chain=CHAIN,
    doc="With several X: each Y becomes the stack of all X. With one: Y becomes the stack of X of all ranks.",
)


def _infer_reduce_scatter(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    found = tensors_of(op, inputs)
    _check_mean(op, found)
    size = job_size(op)
    if len(found) != 1:
        raise SchemaError(f"has {len(found)} tensors, wanted one")
    if found[0].size % size:
        raise ShapeError(
            f"input X ({found[0]}) has {found[0].size} elements, wanted a multiple of {size} ranks"
        )
    return [found[0].with_shape(found[0].size // size)]


register(
    "ReduceScatter",
    inputs=[_X],
    outputs=[Output("Y", "vector of a part of the elements")],
    args=[_OP, _AVERAGE, _SIZE],
    infer=_infer_reduce_scatter,
    chain=CHAIN,
    doc="Y on rank r becomes part r of the sum of X of all ranks, cut into as many equal parts as there are "
    "ranks.",
)


def _infer_nccl_scatter(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    found = tensors_of(op, inputs)
    _check_mean(op, found)
    parts = len(found) if len(found) > 1 else job_size(op)
    if len(op.outputs) != len(found):
        raise SchemaError(f"has {len(found)} tensors and {len(op.outputs)} outputs, wanted one for each")
    if found[0].rank < 1 or found[0].shape[0] != parts:
        raise ShapeError(
            f"input X has shape {format_shape(found[0].shape)}, wanted {parts} as its first dimension"
        )
    return [s.with_shape(*s.shape[1:]) for s in found]


register(
    "NCCLReduceScatter",
    inputs=[_X],
    outputs=[Output("Y", "tensor without the first dimension of X", variadic=True)],
    args=[_OP, _AVERAGE, _SIZE],
    infer=_infer_nccl_scatter,
    chain=CHAIN,
    doc="With several X: Y number i becomes row i of their sum. With one: Y on rank r becomes row r of the "
    "sum of X of all ranks.",
)


def _infer_nothing(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    return []


register(
    "Barrier",
    inputs=[Input("common_world", "ranks to wait for; all by default", types=None, optional=True)],
    infer=_infer_nothing,
    chain=CHAIN,
    doc="Ends when all ranks have come here.",
)


def _infer_world(op: Operator, inputs: Sequence[Any]) -> list[BlobSpec]:
    return [OpaqueSpec("common world")]


register(
    "CreateCommonWorld",
    inputs=[Input("store_handler", "where ranks of Caffe2 meet; not used", types=None, optional=True)],
    outputs=[Output("common_world", "the communicator of all ranks")],
    args=[_SIZE, Int("rank", -1, "number of this process; by default what the launcher says")],
    infer=_infer_world,
    dynamic=True,
    host=True,
    chain=CHAIN,
    doc="Gives the communicator of the process as a blob. The ranks have met when they were started; size "
    "and rank, if given, must be those of the job.",
)
register(
    "CloneCommonWorld",
    inputs=[Input("common_world", "made by CreateCommonWorld", types=None)],
    outputs=[Output("clone", "the same communicator")],
    infer=_infer_world,
    dynamic=True,
    host=True,
    chain=CHAIN,
    doc="Gives the same ranks under another name.",
)
register(
    "DestroyCommonWorld",
    inputs=[Input("common_world", "made by CreateCommonWorld", types=None)],
    outputs=[Output("common_world", "in place", optional=True)],
    enforce_inplace=[(0, 0)],
    infer=_infer_world,
    dynamic=True,
    host=True,
    chain=CHAIN,
    doc="Does nothing: the communicator lives as long as the process.",
)

"""Kernels of collectives on host arrays: over the communicator of the process, or a common world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.dtypes import is_half
from gpunet.errors import ArgumentError, DataTypeError
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.collective import tensors_of
from gpunet.specs import TensorSpec

if TYPE_CHECKING:
    from gpunet.distributed.communicator import Communicator

Array = npt.NDArray[Any]
Inputs = tuple[Any, ...]
Arrays = tuple[Array, ...]


def world_of(inputs: Inputs, args: Arguments) -> tuple[Communicator, tuple[Any, ...]]:
    """The communicator of an operator, and its tensors."""
    from gpunet import distributed

    if inputs and not isinstance(inputs[0], np.ndarray):
        world, tensors = inputs[0], inputs[1:]
        if not isinstance(world, distributed.Communicator):
            raise DataTypeError(f"input 0 holds {type(world).__name__}, wanted a common world or a tensor")
    else:
        world, tensors = distributed.world(), inputs
    check_size(world, args)
    return world, tensors


def check_size(world: Communicator, args: Arguments) -> None:
    """Raises :class:`ArgumentError` if the argument ``size`` is not the number of ranks."""
    if args.has("size") and args.size not in (0, world.size):
        raise ArgumentError(f"argument 'size' is {args.size}, but the job has {world.size} ranks")


def operation(args: Arguments) -> str:
    """How an operator combines tensors."""
    return "mean" if args.average else str(args.op)


def _scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """A total of several tensors of a rank; sums of half types are made in float32."""
    found = tensors_of(op, inputs)
    if len(found) == 1:
        return []
    return [found[0].with_dtype(np.float32) if is_half(found[0].dtype) else found[0]]


def _combine(tensors: Arrays, op: str, total: Array) -> None:
    """The sum, maximum or minimum of several tensors; of a mean the sum."""
    step = {"max": np.maximum, "min": np.minimum}.get(op, np.add)
    np.copyto(total, tensors[0])
    for tensor in tensors[1:]:
        step(total, tensor, out=total, casting="same_kind")


def _within(ctx: KernelContext) -> Any:
    """Messages about what the communicator does from now on name the operator."""
    from gpunet.distributed import failure

    return failure.operator(ctx.op.where, ctx.run.step)


@kernel("Allreduce", scratch=_scratch, bfloat16=True)
def all_reduce(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Combines the tensors of the rank, then those of all ranks."""
    world, tensors = world_of(inputs, args)
    _reduce_all(world, tensors, outputs, operation(args), ctx)


@kernel("NCCLAllreduce", scratch=_scratch, bfloat16=True)
def nccl_all_reduce(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Combines the tensors of the rank, or, if there is one, those of all ranks."""
    world, tensors = world_of(inputs, args)
    _reduce_all(world if len(tensors) == 1 else None, tensors, outputs, operation(args), ctx)


def _reduce_all(
    world: Communicator | None, tensors: Arrays, outputs: Arrays, op: str, ctx: KernelContext
) -> None:
    total = ctx.scratch[0] if len(tensors) > 1 else outputs[0]
    _combine(tensors, op, total)
    if world is not None:
        with _within(ctx):
            world.all_reduce(total, op)
    if op == "mean" and len(tensors) > 1:
        total /= len(tensors)
    for output in outputs:
        if output is not total:
            np.copyto(output, total, casting="same_kind")


@kernel("NCCLReduce", scratch=_scratch, bfloat16=True)
def nccl_reduce(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Combines the tensors of the rank, or, if there is one, those of all ranks on one of them."""
    world, tensors = world_of(inputs, args)
    if len(tensors) > 1:
        _reduce_all(None, tensors, outputs, operation(args), ctx)
        return
    _combine(tensors, "sum", outputs[0])
    with _within(ctx):
        world.reduce(outputs[0], args.root, operation(args))


@kernel("Broadcast", bfloat16=True)
def broadcast(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The first tensor of one rank for all."""
    world, tensors = world_of(inputs, args)
    np.copyto(outputs[0], tensors[0])
    with _within(ctx):
        world.broadcast(outputs[0], args.root)
    for output in outputs[1:]:
        np.copyto(output, outputs[0])


@kernel("NCCLBroadcast", bfloat16=True)
def nccl_broadcast(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """One tensor of the rank, or, if there is one, that of one rank for all."""
    if len(inputs) == 1:
        broadcast(inputs, outputs, args, ctx)
        return
    _, tensors = world_of(inputs, args)
    if not 0 <= args.root < len(tensors):
        raise ArgumentError(f"argument 'root' is {args.root}, wanted 0 to {len(tensors) - 1}")
    chosen = tensors[args.root]
    for output in outputs:
        np.copyto(output, chosen)


@kernel("Allgather", bfloat16=True)
def all_gather(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The elements of all ranks; this rank's are put where they belong first."""
    world, tensors = world_of(inputs, args)
    whole = outputs[0].reshape(world.size, -1)
    own = whole[world.rank]
    parts = own.reshape(len(tensors), -1)
    for part, tensor in zip(parts, tensors, strict=True):
        np.copyto(part, tensor.reshape(-1))
    with _within(ctx):
        world.all_gather(own, outputs[0])


@kernel("NCCLAllGather", bfloat16=True)
def nccl_all_gather(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """The stack of the tensors of the rank, or, if there is one, of those of all ranks."""
    if len(inputs) == 1:
        all_gather(inputs, outputs, args, ctx)
        return
    for output in outputs:
        np.stack(inputs, out=output)


def _scatter_scratch(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[TensorSpec]:
    """X where it is not contiguous, or the sum of several."""
    return _scratch(op, inputs, outputs) or [tensors_of(op, inputs)[0]]


@kernel("ReduceScatter", scratch=_scatter_scratch, bfloat16=True)
def reduce_scatter(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """This rank's part of the sum over all ranks."""
    world, tensors = world_of(inputs, args)
    source = tensors[0]
    if not source.flags.c_contiguous:
        source = ctx.scratch[0]
        np.copyto(source, tensors[0])
    with _within(ctx):
        world.reduce_scatter(source, outputs[0], operation(args))


@kernel("NCCLReduceScatter", scratch=_scatter_scratch, bfloat16=True)
def nccl_reduce_scatter(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Rows of the sum of the tensors of the rank, or, if there is one, a row of that over all ranks."""
    if len(inputs) == 1:
        reduce_scatter(inputs, outputs, args, ctx)
        return
    op = operation(args)
    total = ctx.scratch[0]
    _combine(inputs, op, total)
    if op == "mean":
        total /= len(inputs)
    for output, row in zip(outputs, total, strict=True):
        np.copyto(output, row, casting="same_kind")


@kernel("Barrier")
def barrier(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> None:
    """Waits for all ranks."""
    world, _ = world_of(inputs, args)
    with _within(ctx):
        world.barrier()


@kernel("CreateCommonWorld")
def create_common_world(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Any]:
    """The communicator of the process."""
    from gpunet import distributed

    world = distributed.world()
    check_size(world, args)
    if args.rank not in (-1, world.rank):
        raise ArgumentError(f"argument 'rank' is {args.rank}, but this process is rank {world.rank}")
    return [world]


@kernel("CloneCommonWorld")
def clone_common_world(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Any]:
    """The same communicator."""
    return [world_of(inputs, args)[0]]


@kernel("DestroyCommonWorld")
def destroy_common_world(inputs: Inputs, outputs: Arrays, args: Arguments, ctx: KernelContext) -> list[Any]:
    """Nothing: the communicator lives as long as the process."""
    world, _ = world_of(inputs, args)
    return [world] * len(ctx.op.outputs)

"""Collectives on device memory: NCCL on the stream of the lane, or MPI by way of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.collective import check_size, operation
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

if TYPE_CHECKING:
    from gpunet.distributed.communicator import Communicator


def _several(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    """Several tensors of one process, which may be of several devices, are combined on the host."""
    return None if len(inputs) == 1 else f"it takes {len(inputs)} tensors, kernels there take one"


def _collective(ctx: KernelContext, args: Arguments, work: Callable[[Communicator], None]) -> Launch:
    """A launch that does ``work`` with the communicator of the process, under the name of the operator."""
    from gpunet import distributed
    from gpunet.distributed import failure

    check_size(distributed.world(), args)
    where, run = ctx.op.where, ctx.run

    def launch() -> None:
        with failure.operator(where, run.step):
            work(distributed.world())

    return launch


def _brought(ctx: KernelContext, source: Any, target: Any) -> None:
    """Puts X where Y is, unless it is there."""
    if source.pointer != target.pointer:
        ctx.backend.copy(target, source.view(target.shape), ctx.stream)


@kernel("Allreduce", "NCCLAllreduce", device="cuda", binds=True, against=_several)
def all_reduce(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Combines the tensors of all ranks."""
    x, y = inputs[0], outputs[0]

    def work(world: Communicator) -> None:
        _brought(ctx, x, y)
        world.all_reduce(y, operation(args), ctx.stream)

    return _collective(ctx, args, work)


@kernel("Broadcast", "NCCLBroadcast", device="cuda", binds=True, against=_several)
def broadcast(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The tensor of one rank for all."""
    x, y = inputs[0], outputs[0]

    def work(world: Communicator) -> None:
        _brought(ctx, x, y)
        world.broadcast(y, args.root, ctx.stream)

    return _collective(ctx, args, work)


@kernel("NCCLReduce", device="cuda", binds=True, against=_several)
def reduce(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Combines the tensors of all ranks on one of them."""
    x, y = inputs[0], outputs[0]

    def work(world: Communicator) -> None:
        _brought(ctx, x, y)
        world.reduce(y, args.root, operation(args), ctx.stream)

    return _collective(ctx, args, work)


@kernel("Allgather", "NCCLAllGather", device="cuda", binds=True, against=_several)
def all_gather(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The elements of all ranks."""
    x, y = inputs[0], outputs[0]
    return _collective(ctx, args, lambda world: world.all_gather(x, y, ctx.stream))


@kernel("ReduceScatter", "NCCLReduceScatter", device="cuda", binds=True, against=_several)
def reduce_scatter(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """This rank's part of the sum over all ranks."""
    x, y = inputs[0], outputs[0]
    return _collective(ctx, args, lambda world: world.reduce_scatter(x, y, operation(args), ctx.stream))

"""Collectives on device memory: NCCL on the stream of the lane, or MPI by way of the host. Several tensors of
one process, each on a GPU of its own, go by NCCL as a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.collective import check_size, operation
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.errors import ArgumentError
from gpunet.kernels import SPREAD, KernelContext, kernel
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

if TYPE_CHECKING:
    from gpunet.distributed.communicator import Communicator
    from gpunet.distributed.nccl_group import DeviceGroup


def _several(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    """Several tensors of one process are combined on the host, unless each is on a GPU of its own."""
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


# ---- several GPUs of one process ----


def _against_group(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    from gpunet.distributed.nccl_group import why_not

    reduces = op.type in ("NCCLAllreduce", "NCCLReduce", "NCCLReduceScatter")
    return why_not(inputs[0].dtype.name, operation(op.args) if reduces else "")


def _group(inputs: Buffers) -> DeviceGroup:
    from gpunet.distributed.nccl_group import group

    return group(tuple(x.backend.device for x in inputs))


@kernel("NCCLAllreduce", device="cuda", engine=SPREAD, binds=True, against=_against_group)
def group_all_reduce(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Each tensor becomes the sum of all."""
    return partial(_group(inputs).all_reduce, inputs, outputs, operation(args))


@kernel("NCCLReduce", device="cuda", engine=SPREAD, binds=True, against=_against_group)
def group_reduce(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The sum of all, on the GPU of the first."""
    return partial(_group(inputs).reduce, inputs, outputs[0], operation(args))


@kernel("NCCLBroadcast", device="cuda", engine=SPREAD, binds=True, against=_against_group)
def group_broadcast(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """Each tensor becomes that of number ``root``."""
    if not 0 <= args.root < len(inputs):
        raise ArgumentError(f"argument 'root' is {args.root}, wanted 0 to {len(inputs) - 1}")
    return partial(_group(inputs).broadcast, inputs, outputs, args.root)


@kernel("NCCLAllGather", device="cuda", engine=SPREAD, binds=True, against=_against_group)
def group_all_gather(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """The stack of all, on each GPU."""
    return partial(_group(inputs).all_gather, inputs, outputs)


@kernel("NCCLReduceScatter", device="cuda", engine=SPREAD, binds=True, against=_against_group)
def group_reduce_scatter(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """A row of the sum of all for each GPU."""
    return partial(_group(inputs).reduce_scatter, inputs, outputs, operation(args))

"""The CPU's kernel in the place of a library, on the simulated device."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.cuda_kernels.pieces import Buffers, Launch
from gpunet.kernels import KernelContext, find


def reference_launch(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """A call of the kernel that the CPU has for the operator, in the order of the stream.

    It works on the memory of the buffers and has scratch of its own on the host. Only the simulated device
    can; elsewhere the call raises :class:`DeviceError`.
    """
    op, backend, stream = ctx.op, ctx.backend, ctx.stream
    specs = [b.spec for b in inputs], [b.spec for b in outputs]
    found = find(op, "cpu", *specs)
    wanted = found.scratch(op, *specs) if found.scratch is not None else ()
    count = len(inputs)

    def call(*arrays: npt.NDArray[np.generic]) -> None:
        scratch = tuple(np.empty(s.shape, s.dtype) for s in wanted)
        context = dataclasses.replace(ctx, scratch=scratch, backend=None, stream=None, step_buffer=None)
        with np.errstate(all="ignore"):
            result = found.function(arrays[:count], arrays[count:], args, context)
            if found.binds:
                result()

    call.__name__ = f"{op.type} on the host"
    buffers = (*inputs, *outputs)

    def launch() -> None:
        backend.call_host(call, buffers, stream, reads=count)

    return launch

"""Kernels in pieces: large tensors are cut so that threads share them, and so that a piece stays in a cache
where a kernel goes over it several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Final

from gpunet.arguments import Arguments
from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.cpu_fallback.steps import Step
from gpunet.cpu_fallback.threads import cuts, thread_count
from gpunet.crew import CREW
from gpunet.kernels import KernelContext

#: Elements between two places where a tensor may be cut.
_BLOCK: Final = 1024

Binding = Callable[[Arrays, Arrays, Arguments, KernelContext], Step]


def in_pieces(bind: Binding) -> Binding:
    """A kernel with ``binds=True`` that binds to pieces of its tensors, where they are large.

    Each element of an output may depend on the same element of inputs, outputs and scratch alone, and on
    tensors of one element. Where a tensor has another shape than output 0, the kernel is bound as a whole.
    """

    @wraps(bind)
    def bind_pieces(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
        first = outputs[0]
        ranges = [
            (begin * _BLOCK, min(end * _BLOCK, first.size))
            for begin, end in cuts(-(-first.size // _BLOCK), _BLOCK * first.itemsize)
        ]
        tensors = (*inputs, *outputs, *ctx.scratch)
        if len(ranges) < 2 or not all(a.size == 1 or _is_like(a, first) for a in tensors):
            return bind(inputs, outputs, args, ctx)

        def part(arrays: tuple[Any, ...], begin: int, end: int) -> Arrays:
            # Pieces have one dimension, and what goes with all of them must not have more.
            flat = (a if a.ndim < 2 else a.reshape(-1) for a in arrays)
            return tuple(a if a.size == 1 else a[begin:end] for a in flat)

        steps = [
            bind(
                part(inputs, *r),
                part(outputs, *r),
                args,
                dataclasses.replace(ctx, scratch=part(ctx.scratch, *r)),
            )
            for r in ranges
        ]
        return together(steps)

    return bind_pieces


def together(steps: Sequence[Step]) -> Step:
    """One step that runs all of these, by several threads where cores are free."""
    if len(steps) == 1:
        return steps[0]
    return lambda: CREW.run(steps, thread_count())


def bound(function: Callable[[Arrays, Arrays, Arguments, KernelContext], None]) -> Binding:
    """A kernel with ``binds=True`` from one without."""

    @wraps(function)
    def bind(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
        return partial(function, inputs, outputs, args, ctx)

    return bind


def _is_like(array: Array, first: Array) -> bool:
    return array.shape == first.shape and array.flags.c_contiguous

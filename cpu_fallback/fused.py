"""The NumPy kernel of a fused run of elementwise operators: their own kernels, on one block of all tensors
after the other, with what lies between them in the cache.

So results are those of the operators one by one, bit for bit; only a sum at the end is added up by blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.broadcasting import collapse, strides_along
from gpunet.cpu_fallback.precision import Array, Arrays
from gpunet.cpu_fallback.steps import Specs, Step, constant
from gpunet.cpu_fallback.threads import split, thread_count
from gpunet.dtypes import is_half
from gpunet.kernels import Kernel, KernelContext, find, kernel
from gpunet.operator import Operator
from gpunet.operators.fused import Body, read_body
from gpunet.specs import Shape, TensorSpec

#: Elements in a block: of float32, a dozen of blocks fit a second-level cache.
BLOCK: Final = 1 << 15
#: Blocks at most: larger tensors have larger ones, since each costs memory and time to bind.
_MAX_BLOCKS: Final = 1 << 10
_ALIGNMENT: Final = 64
#: Bytes that pass through the cache in the time of one that comes from memory.
_CACHED: Final = 8


@dataclass(frozen=True)
class _Blocks:
    """How the positions are cut into blocks.

    Attributes:
        sizes: the shape, with dimensions joined that all operands walk as one.
        operands: shapes of the operands in these dimensions, 1 where they are broadcast.
        axis: the dimension that is cut; those before it are walked one by one.
        step: how much of it is in a block.
    """

    sizes: Shape
    operands: tuple[Shape, ...]
    axis: int
    step: int

    @property
    def shape(self) -> Shape:
        """Of the largest block."""
        return (self.step, *self.sizes[self.axis + 1 :])

    def __len__(self) -> int:
        return math.prod(self.sizes[: self.axis]) * -(-self.sizes[self.axis] // self.step)

    def __iter__(self) -> Iterator[tuple[slice, ...]]:
        for outer in np.ndindex(*self.sizes[: self.axis]):
            for start in range(0, self.sizes[self.axis], self.step):
                yield (*(slice(i, i + 1) for i in outer), slice(start, start + self.step))


def _blocks(body: Body) -> _Blocks:
    groups = collapse(body.shape, *(strides_along(o, body.shape) for o in body.operands)) or [
        (1, (0,) * len(body.operands))
    ]
    sizes = tuple(size for size, _ in groups)
    operands = tuple(
        tuple(size if strides[i] else 1 for size, strides in groups) for i in range(len(body.operands))
    )
    if not body.size:
        return _Blocks((0,), tuple((math.prod(o),) for o in body.operands), 0, 1)
    wanted = max(BLOCK, body.size // _MAX_BLOCKS)
    axis, inner = len(sizes) - 1, 1
    while axis > 0 and inner * sizes[axis] <= wanted:
        inner *= sizes[axis]
        axis -= 1
    return _Blocks(sizes, operands, axis, max(1, min(sizes[axis], wanted // inner)))


@dataclass(frozen=True)
class _Layout:
    """The scratch of a thread, in bytes: slots for blocks of results, then scratch of the operators' kernels.

    Attributes:
        slots: the slot of each result.
        spare: a slot that no result has at the end.
        slot_bytes: bytes of a slot.
        scratch_bytes: bytes of what the kernel of an operator wants at most.
    """

    slots: dict[str, int]
    spare: int
    slot_bytes: int
    scratch_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of it all."""
        return (self.spare + 1) * self.slot_bytes + self.scratch_bytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _layout(body: Body, shape: Shape) -> _Layout:
    left = body.uses
    slots: dict[str, int] = {}
    free: list[int] = []
    count = 0
    scratch = 0
    for op in body.operators:
        for name in op.inputs:
            left[name] -= 1
        dead = [n for n in dict.fromkeys(op.inputs) if n in slots and not left[n]]
        (output,) = op.outputs
        over = next((n for n in dead if _may_overwrite(op, n, body)), None)
        if over is not None:
            slots[output] = slots[over]
        else:
            if not free:
                free.append(count)
                count += 1
            slots[output] = free.pop()
        free.extend(slots[n] for n in dead if n != over)
        wanted = _inner_scratch(_find(op, body), op, body, shape)
        scratch = max(scratch, sum(_aligned(s.nbytes) for s in wanted))
    widest = max(body.specs[name].dtype.itemsize for name in slots)
    return _Layout(slots, count, _aligned(math.prod(shape) * widest), scratch)


def _may_overwrite(op: Operator, name: str, body: Body) -> bool:
    """Whether the kernel of ``op`` is right when its output lies in the memory of an input."""
    same = body.specs[name].dtype == body.specs[op.outputs[0]].dtype
    return same and op.inputs.count(name) == 1 and (op.inputs.index(name), 0) in op.schema.inplace


def _find(op: Operator, body: Body) -> Kernel:
    return find(op, "cpu", [body.specs[n] for n in op.inputs], [body.specs[n] for n in op.outputs])


def _inner_scratch(found: Kernel, op: Operator, body: Body, shape: Shape) -> Sequence[TensorSpec]:
    if found.scratch is None:
        return ()
    specs = {name: TensorSpec(shape, body.specs[name].dtype) for name in (*op.inputs, *op.outputs)}
    return found.scratch(op, [specs[n] for n in op.inputs], [specs[n] for n in op.outputs])


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if is_half(dtype) else dtype


def _scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    """A layout for each thread, and the sums of the blocks."""
    body = read_body(op, inputs)
    blocks = _blocks(body)
    teams = min(thread_count(), len(blocks))
    found = [TensorSpec((_layout(body, blocks.shape).nbytes,), np.dtype(np.uint8))] * teams
    if body.total is not None:
        found.append(TensorSpec((len(blocks) + 1,), _wide(body.specs[body.result].dtype)))
    return found


@kernel("FusedElementwise", binds=True, scratch=_scratch, bfloat16=True)
def fused(inputs: Arrays, outputs: Arrays, args: Arguments, ctx: KernelContext) -> Step:
    """The operators of the body on one block after the other; threads share the blocks."""
    body = read_body(ctx.op, inputs)
    blocks = _blocks(body)
    layout = _layout(body, blocks.shape)
    sources = [x.reshape(shape) for x, shape in zip(inputs, blocks.operands, strict=True)]
    teams = len(ctx.scratch) - (body.total is not None)
    sums = ctx.scratch[teams] if body.total is not None else None
    target = outputs[0].reshape(blocks.sizes) if sums is None else None
    aliased = {
        name
        for name, x in zip(args.body.external_input, inputs, strict=True)
        if target is not None and np.may_share_memory(x, target)
    }
    kernels = [(op, _find(op, body)) for op in body.operators]
    steps: list[list[Step]] = [[] for _ in range(teams)]
    for number, block in enumerate(blocks):
        team = number * teams // len(blocks)
        values = {
            name: _part(x, block, blocks.axis)
            for name, x in zip(args.body.external_input, sources, strict=True)
        }
        binder = _Binder(body, kernels, layout, ctx, ctx.scratch[team], aliased)
        result = None if target is None else _part(target, block, blocks.axis)
        steps[team] += binder.bind(values, result)
        if sums is not None:
            total = sums[number : number + 1].reshape(())
            steps[team].append(
                partial(np.add.reduce, values[body.result], axis=None, dtype=sums.dtype, out=total)
            )
    run = _in_threads(steps, _work_bytes(body))
    if sums is None:
        return run
    whole, y, divisor = sums[len(blocks) :].reshape(()), outputs[0], constant(body.divisor, sums)

    def run_and_sum() -> None:
        run()
        np.add.reduce(sums[:-1], axis=None, out=whole)
        np.divide(whole, divisor, out=y, casting="same_kind")

    return run_and_sum


def _work_bytes(body: Body) -> int:
    """Bytes of one pass over memory that takes as long."""
    passes = _CACHED + len(body.operators)
    return body.size * body.specs[body.result].dtype.itemsize * passes // _CACHED


def _in_threads(steps: Sequence[Sequence[Step]], nbytes: int) -> Step:
    """A step that runs lists of steps, each in one thread, if ``nbytes`` of work pay."""

    def work(begin: int, end: int) -> None:
        for team in steps[begin:end]:
            for step in team:
                step()

    if len(steps) < 2:
        return partial(work, 0, len(steps))
    return partial(split, len(steps), nbytes // len(steps), work)


def _part(x: Array, block: Sequence[slice], axis: int) -> Array:
    """A block of a tensor, in the dimensions from ``axis`` on."""
    index = tuple(s if n > 1 else slice(0, 1) for s, n in zip(block, x.shape, strict=False))
    found = x[index]
    return found.reshape(found.shape[axis:])


class _Binder:
    """Binds the kernels of a body to one block."""

    def __init__(
        self,
        body: Body,
        kernels: Sequence[tuple[Operator, Kernel]],
        layout: _Layout,
        ctx: KernelContext,
        memory: Array,
        aliased: set[str],
    ) -> None:
        self._body = body
        self._kernels = kernels
        self._layout = layout
        self._ctx = ctx
        self._memory = memory
        self._aliased = aliased

    def bind(self, values: dict[str, Array], result: Array | None) -> list[Step]:
        """The steps of a block; ``values`` gets what the operators give, ``result`` what the last gives."""
        body, layout = self._body, self._layout
        shape = np.broadcast_shapes(*(x.shape for x in values.values()))
        if result is not None:
            shape = result.shape
        steps: list[Step] = []
        copies: list[Step] = []
        for op, found in self._kernels:
            (name,) = op.outputs
            slot = layout.slots[name]
            if result is not None and name == body.result:
                if all(n not in self._aliased or _may_overwrite(op, n, body) for n in op.inputs):
                    values[name] = result
                else:
                    slot = layout.spare
                    copies = [partial(np.copyto, result, self._slot(slot, shape, result.dtype))]
            if name not in values:
                values[name] = self._slot(slot, shape, body.specs[name].dtype)
            steps.append(self._step(found, op, tuple(values[n] for n in op.inputs), values[name], shape))
        return steps + copies

    def _slot(self, slot: int, shape: Shape, dtype: np.dtype) -> Array:
        return self._view(slot * self._layout.slot_bytes, TensorSpec(shape, dtype))

    def _view(self, offset: int, spec: TensorSpec) -> Array:
        found: Array = self._memory[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
        return found

    def _step(self, found: Kernel, op: Operator, inputs: Arrays, output: Array, shape: Shape) -> Step:
        offset = (self._layout.spare + 1) * self._layout.slot_bytes
        scratch = []
        for spec in _inner_scratch(found, op, self._body, shape):
            scratch.append(self._view(offset, spec))
            offset += _aligned(spec.nbytes)
        context = KernelContext(op, self._ctx.run, scratch=tuple(scratch))
        arguments: tuple[Any, ...] = (inputs, (output,), op.args, context)
        if not found.binds:
            return partial(found.function, *arguments)
        step: Callable[[], Any] = found.function(*arguments)
        return step

"""bfloat16 on the CPU: kernels that know nothing of it run in float32, on copies.

A kernel gets each input of bfloat16 widened, and a float32 for each such output, which is rounded to nearest
even when it has run. Copies lie in scratch. An output in place of an input shares its copy,
so that a kernel that writes only a part of it is right too. A kernel that takes bfloat16 itself says so
(``bfloat16=True``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpunet.arguments import Arguments
from gpunet.dtypes import bfloat16, is_bfloat16
from gpunet.operator import Operator
from gpunet.specs import BlobSpec, TensorSpec

if TYPE_CHECKING:
    from gpunet.kernels import Kernel, KernelContext

_Array = npt.NDArray[Any]
_Specs = Sequence[BlobSpec | None]


def is_narrow(value: object) -> bool:
    """Whether an array, or the spec of one, is bfloat16."""
    return isinstance(value, (np.ndarray, TensorSpec)) and is_bfloat16(value.dtype)


def wide_specs(specs: _Specs) -> list[Any]:
    """The specs, with float32 for bfloat16."""
    return [s.with_dtype(np.float32) if isinstance(s, TensorSpec) and is_narrow(s) else s for s in specs]


@functools.cache
def widened(found: Kernel) -> Kernel:
    """A kernel that does on bfloat16 what ``found`` does on float32."""
    if found.bfloat16:
        return found
    return dataclasses.replace(
        found,
        function=functools.partial(_bind, found),
        binds=True,
        scratch=functools.partial(_scratch, found),
        bfloat16=True,
    )


def _scratch(found: Kernel, op: Operator, inputs: _Specs, outputs: _Specs) -> list[TensorSpec]:
    """The copies, inputs first, then what the kernel itself wants."""
    wide = wide_specs(inputs), wide_specs(outputs)
    narrow = [is_narrow(s) for s in [*inputs, *outputs]]
    copies = [s for s, copied in zip([*wide[0], *wide[1]], narrow, strict=True) if copied]
    return [*copies, *(found.scratch(op, *wide) if found.scratch is not None else ())]


def _bind(
    found: Kernel, inputs: tuple[Any, ...], outputs: tuple[Any, ...], args: Arguments, ctx: KernelContext
) -> Callable[[], Any]:
    if ctx.op.dynamic:
        return functools.partial(_fresh_values, found, inputs, args, ctx)
    scratch = iter(ctx.scratch)
    reads = [(next(scratch), x) if is_narrow(x) else (x, x) for x in inputs]
    writes = []
    for y in outputs:
        wide = next(scratch) if is_narrow(y) else y
        shared = next((w for w, x in reads if w is not x and wide is not y and _is_same(x, y)), None)
        writes.append((y, wide if shared is None else shared.reshape(y.shape)))
    context = dataclasses.replace(ctx, scratch=tuple(scratch))
    arguments = tuple(w for w, _ in reads), tuple(w for _, w in writes), args, context
    step = found.function(*arguments) if found.binds else functools.partial(found.function, *arguments)
    before = [(w, x) for w, x in reads if w is not x]
    after = [(y, w) for y, w in writes if y is not w]

    def run() -> None:
        for w, x in before:
            np.copyto(w, x)
        step()
        for y, w in after:
            np.copyto(y, w, casting="same_kind")

    return run


def _is_same(x: _Array, y: _Array) -> bool:
    return bool(x.size) and x.nbytes == y.nbytes and x.ctypes.data == y.ctypes.data


def _fresh_values(found: Kernel, inputs: tuple[Any, ...], args: Arguments, ctx: KernelContext) -> list[Any]:
    """What the kernel of a dynamic operator returns: what is made of bfloat16 is bfloat16."""
    wide = tuple(x.astype(np.float32) if is_narrow(x) else x for x in inputs)
    result = found.function(wide, (), args, ctx)
    values = result() if found.binds else result
    single = [isinstance(v, np.ndarray) and v.dtype == np.float32 for v in values]
    return [v.astype(bfloat16()) if s else v for v, s in zip(values, single, strict=True)]

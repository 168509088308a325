"""The kernel contract and the registry of kernels by (operator, device kind, engine).

A kernel is a function ``kernel(inputs, outputs, args, ctx)``:

* ``inputs``: a tuple of arrays (NumPy arrays on the CPU), in the order of the operator's inputs; opaque blobs
  come as their objects.
* ``outputs``: a tuple of arrays to be filled, with the shapes and types that the schema's ``infer`` gave.
  They hold garbage before the kernel runs, except where an in-place pair makes one the same array as an
  input.
* ``args``: the parsed :class:`~gpunet.arguments.Arguments`.
* ``ctx``: a :class:`KernelContext`: scratch, random key, step.

and nothing else: it allocates no results, does not synchronise, changes no input. Two variations exist:

* ``binds=True``: the function is called once, when a program is bound to its buffers, and returns a callable
  without arguments that does the work. For kernels with something to prepare (views, index tables, launch
  parameters). Inputs hold no data yet then.
* operators declared dynamic: ``outputs`` is empty and the kernel returns a sequence of fresh values (arrays
  or objects), one an output.

Scratch memory is declared, not allocated: ``scratch(op, inputs, outputs)`` returns the specs (of tensors)
that the kernel wants, and ``ctx.scratch`` holds uninitialised arrays for them during the call. Steps of a
program share that memory. What a library wants depends on the device: :func:`scratch_device` tells for which
one is asked.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from gpunet.errors import DeviceError, SchemaError
from gpunet.operator import Operator
from gpunet.specs import TensorSpec
from gpunet.widening import is_narrow, wide_specs, widened

KernelFunction: TypeAlias = Callable[..., Any]
ScratchFunction: TypeAlias = Callable[[Operator, Sequence[Any], Sequence[Any]], Sequence[TensorSpec]]
F = TypeVar("F", bound=KernelFunction)

#: Name of the kernel that serves where no engine is asked for, or none of those asked for is registered.
DEFAULT_ENGINE: Final = ""
#: Name of kernels that take each tensor on a device of its own; :func:`find_spread` finds them.
SPREAD: Final = "several devices"


class StopNet(Exception):  # noqa: N818 (no error)
    """Raised by the kernel of a dynamic operator: the rest of the net is not run this time."""


class RunState:
    """What changes from run to run of one net: shared by the contexts of all its steps."""

    __slots__ = ("step",)

    def __init__(self, step: int = 0) -> None:
        #: How many times the net has run before; the third part of the key of random draws.
        self.step = step


@dataclass(slots=True)
class KernelContext:
    """What a kernel may know beside its data.

    Random kernels draw with ``gpunet.philox`` at the key (``seed``, ``operator_id``, ``run.step``).
    """

    op: Operator
    run: RunState = field(default_factory=RunState)
    seed: int = 0
    operator_id: int = 0
    scratch: tuple[Any, ...] = ()
    #: The device and its stream, and the step in device memory (one uint64): for kernels of other devices
    #: than the CPU.
    backend: Any = None
    stream: Any = None
    step_buffer: Any = None


#: Tells why a kernel cannot run an operator on inputs and outputs of these specs; ``None`` if it can.
SupportFunction: TypeAlias = Callable[[Operator, Sequence[Any], Sequence[Any]], "str | None"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A registered kernel."""

    type: str
    device: str
    engine: str
    function: KernelFunction
    binds: bool
    scratch: ScratchFunction | None
    against: SupportFunction | None
    bfloat16: bool = False


_scratch_device: ContextVar[Any] = ContextVar("device that scratch memory is asked for", default=None)


def wanted_scratch(
    found: Kernel, op: Operator, inputs: Sequence[Any], outputs: Sequence[Any], device: Any
) -> Sequence[TensorSpec]:
    """The scratch that a kernel wants on ``device``."""
    if found.scratch is None:
        return ()
    token = _scratch_device.set(device)
    try:
        return found.scratch(op, inputs, outputs)
    finally:
        _scratch_device.reset(token)


def scratch_device() -> Any:
    """The device for which a scratch function is asked just now; ``None`` outside of programs."""
    return _scratch_device.get()


_kernels: dict[tuple[str, str, str], Kernel] = {}
#: Import names of the packages that register the kernels of a device kind. The simulated device runs those of
#: CUDA.
_PROVIDERS: Final = {"cpu": "gpunet.cpu_fallback", "cuda": "gpunet.cuda_kernels"}
_KERNEL_KIND: Final = {"cpu": "cpu", "cuda": "cuda", "sim": "cuda"}


def kernel(
    *types: str,
    device: str = "cpu",
    engine: str = DEFAULT_ENGINE,
    binds: bool = False,
    scratch: ScratchFunction | None = None,
    against: SupportFunction | None = None,
    bfloat16: bool = False,
) -> Callable[[F], F]:
    """Registers the decorated function as kernel of the operator ``types`` on ``device`` with ``engine``.

    ``against`` tells why it cannot run certain shapes, types or arguments; another engine, then the CPU,
    takes those. ``bfloat16`` tells of a kernel for the CPU that it takes arrays of bfloat16 as they are;
    others get them in float32 (:mod:`gpunet.widening`).
    """

    def decorate(function: F) -> F:
        for type in types:
            key = (type, device, engine)
            if key in _kernels:
                raise SchemaError(
                    f"operator {type!r} already has a kernel on {device!r} with engine {engine!r}"
                )
            _kernels[key] = Kernel(type, device, engine, function, binds, scratch, against, bfloat16)
        return function

    return decorate


@functools.cache
def load(device: str) -> None:
    """Imports the kernels of a device kind, once."""
    provider = _PROVIDERS.get(_KERNEL_KIND.get(device, device))
    if provider is None:
        raise DeviceError(
            f"no kernels are made for devices of kind {device!r}, wanted one of {', '.join(_KERNEL_KIND)}"
        )
    importlib.import_module(provider)


def find(op: Operator, device: str, inputs: Sequence[Any] = (), outputs: Sequence[Any] = ()) -> Kernel:
    """The kernel for ``op`` on a device kind, on inputs and outputs of these specs.

    The definition's ``engine`` may list several names with commas: they are tried left to right, then the
    default one. Raises :class:`DeviceError` when there is none.
    """
    found, reason = _search(op, device, inputs, outputs)
    if found is None:
        raise DeviceError(f"cannot run on device kind {device!r}: {reason}")
    return found


def find_spread(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> Kernel | None:
    """The kernel for tensors that lie on a GPU each, if there is one for these specs."""
    found = _kernels.get((op.type, "cuda", SPREAD))
    if found is None or (found.against is not None and found.against(op, inputs, outputs)):
        return None
    return found


def exists(op: Operator, *devices: str) -> bool:
    """Whether any kernel for the operator's type is registered on one of the device kinds, for some shapes
    and types.
    """
    kinds = set()
    for device in devices:
        load(device)
        kinds.add(_KERNEL_KIND[device])
    return any(type == op.type and kind in kinds for type, kind, _ in _kernels)


def reason_against(op: Operator, device: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
    """Why no kernel on a device kind can run ``op`` on these specs; ``None`` if one can."""
    return _search(op, device, inputs, outputs)[1]


def _search(
    op: Operator, device: str, inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[Kernel, None] | tuple[None, str]:
    load(device)
    kind = _KERNEL_KIND[device]
    if kind != "cpu" and any(not isinstance(s, TensorSpec) or s.dtype == object for s in [*inputs, *outputs]):
        return None, "strings and opaque objects stay on the host"
    narrow = kind == "cpu" and any(is_narrow(s) for s in [*inputs, *outputs])
    reason = f"there is no kernel of {op.type} for it"
    engines = [name for name in (e.strip() for e in op.definition.engine.split(",")) if name]
    for engine in [*engines, DEFAULT_ENGINE]:
        found = _kernels.get((op.type, kind, engine))
        if found is None:
            continue
        specs = (wide_specs(inputs), wide_specs(outputs)) if narrow else (inputs, outputs)
        against = None if found.against is None else found.against(op, *specs)
        if against is None:
            return widened(found) if narrow else found, None
        reason = against
    return None, reason

"""Checks of one operator: its gradient against central differences, a device against the CPU, and the order
of threads.

What ``gpunet check-grad`` runs; :mod:`gpunet.operator_check` gives the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from gpunet import kernels, schema
from gpunet.backends import backend
from gpunet.devices import parse_device
from gpunet.dtypes import float_limits, is_float
from gpunet.errors import GpunetError, GradientError, KernelError
from gpunet.gradient_maker import GradientSlice
from gpunet.gradients import gradient_ops
from gpunet.operator import Operator
from gpunet.proto import NetDef, OperatorDef
from gpunet.specs import BlobSpec, OpaqueSpec, TensorSpec
from gpunet.workspace import Workspace

Array: TypeAlias = npt.NDArray[Any]

#: Step of the differences, and how many elements of a large input are tried.
EPSILON: Final = 1e-5
MAX_PROBES: Final = 48
RELATIVE: Final = 1e-4
ABSOLUTE: Final = 1e-7
#: How far a device may be off the CPU, relative to a value and to the largest one of its tensor.
TOLERANCE: Final = {"float16": 2e-3, "bfloat16": 2.0**-7, "float32": 1e-5, "float64": 1e-12}
#: Random operators whose results are not random bits alone: they go through functions in whose last place
#: libraries differ, or are computed from an input.
_ROUNDED: Final = frozenset(["GaussianFill", "MSRAFill", "Dropout"])
#: Seed of the workspaces that operators run in.
SEED: Final = 1701


class DisagreementError(GpunetError, ArithmeticError):
    """Two ways of computing one thing differ by more than they may."""


def double(value: Any) -> Any:
    """A floating-point array as float64; anything else as it is."""
    if _is_float(value):
        return value.astype(np.float64)
    return value


def specs_of(values: Sequence[Any]) -> list[BlobSpec]:
    """Specs of what blobs are to hold."""
    return [
        TensorSpec(x.shape, x.dtype) if isinstance(x, np.ndarray) else OpaqueSpec(type(x).__name__)
        for x in values
    ]


def loss_outputs(definition: OperatorDef) -> list[str]:
    """The outputs that a gradient starts from: the first; all of a variadic list, or where the first alone is
    refused.
    """
    declared, names = schema.lookup(definition.type), list(definition.output)
    if bool(declared.outputs) and declared.output_at(len(names)).variadic:
        return names
    for chosen in (names[:1], names):
        try:
            gradient_ops(definition, {name: f"{name}_grad" for name in chosen})
        except GradientError:
            continue
        return chosen
    return names[:1]  # what is wrong is said where it is used


def has_gradient(definition: OperatorDef) -> bool:
    """Whether the schema makes gradients of this type."""
    return callable(schema.lookup(definition.type).gradient)


def check_gradient(
    definition: OperatorDef,
    inputs: Sequence[Any],
    *,
    wrt: Sequence[int] | None = None,
    of: Sequence[str] | None = None,
    seed: int = 5,
) -> float:
    """Compares gradients with central differences, in float64 on the CPU.

    The loss is the sum of the outputs weighted by random numbers between 0.5 and 1.5. Allowed is
    ``1e-7 + 1e-4 * |difference quotient|``.

    Args:
        definition: the operator.
        inputs: what its inputs hold; floats are taken as float64.
        wrt: indices of the inputs to differentiate by; by default all float inputs that have a gradient.
        of: outputs that the loss depends on; by default :func:`loss_outputs`.
        seed: of the weights and of which elements are tried.

    Returns:
        The largest error found, as a part of what is allowed.

    Raises:
        DisagreementError: a gradient is wrong, or has another shape or type than its input.
        GradientError: there is no gradient.
    """
    rng = np.random.default_rng(seed)
    values = [double(x.copy() if isinstance(x, np.ndarray) else x) for x in inputs]
    names = list(definition.input)
    forward = Workspace("cpu", seed=SEED)
    feed(forward, names, values)
    forward.create(NetDef(name="forward", op=[definition]))
    forward.run("forward")
    weights = {}
    for name in loss_outputs(definition) if of is None else of:
        weights[name] = rng.uniform(0.5, 1.5, np.shape(forward.fetch(name)))

    def loss() -> float:
        feed(forward, names, values)
        forward.run("forward")
        return float(sum((forward.fetch(name) * weight).sum() for name, weight in weights.items()))

    loss()
    steps, gradients = gradient_ops(definition, {name: f"{name}_grad" for name in weights})
    backward = Workspace("cpu", seed=SEED)
    feed(backward, names, values)
    for name in definition.output:
        backward.feed(name, forward.fetch(name))
    for name, weight in weights.items():
        backward.feed(f"{name}_grad", weight)
    for step in steps:
        backward.run_operator(step)
    if wrt is None:
        wrt = [i for i, x in enumerate(values) if names[i] in gradients and _is_float(x)]
        if not wrt:
            raise GradientError(f"[{definition.type}] no input got a gradient, wanted one at least")
    worst = 0.0
    for i in wrt:
        analytic = _fetch_gradient(backward, gradients, names[i], values[i])
        worst = max(worst, _compare_slopes(f"[{definition.type}] ", i, values[i], analytic, loss, rng))
    return worst


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and is_float(value.dtype)


def _fetch_gradient(
    workspace: Workspace, gradients: Mapping[str, str | GradientSlice], name: str, value: Array
) -> Array:
    found = gradients.get(name)
    if found is None:
        raise GradientError(f"input {name!r} got no gradient")
    if isinstance(found, GradientSlice):
        dense = np.zeros_like(value)
        np.add.at(dense, workspace.fetch(found.indices), workspace.fetch(found.values))
        return dense
    gradient: Array = workspace.fetch(found)
    if (gradient.shape, gradient.dtype) != (value.shape, value.dtype):
        raise DisagreementError(
            f"the gradient of input {name!r} is {gradient.dtype} {gradient.shape}, wanted {value.dtype} "
            f"{value.shape}"
        )
    return gradient


def _compare_slopes(
    where: str,
    index: int,
    value: Array,
    analytic: Array,
    loss: Callable[[], float],
    rng: np.random.Generator,
) -> float:
    flat, found = value.reshape(-1), analytic.reshape(-1)
    some = flat.size > MAX_PROBES
    probes = rng.choice(flat.size, MAX_PROBES, replace=False) if some else np.arange(flat.size)
    worst = 0.0
    for p in probes:
        kept = flat[p]
        flat[p] = kept + EPSILON
        above = loss()
        flat[p] = kept - EPSILON
        below = loss()
        flat[p] = kept
        slope = (above - below) / (2 * EPSILON)
        part = abs(found[p] - slope) / (ABSOLUTE + RELATIVE * abs(slope))
        if not part <= 1 and not (np.isnan(found[p]) and np.isnan(slope)) and found[p] != slope:
            raise DisagreementError(
                f"{where}gradient of input {index}, element {p}: {found[p]:.9g}, wanted {slope:.9g} (the "
                "difference quotient)"
            )
        worst = max(worst, 0.0 if np.isnan(part) else float(part))
    return worst


# ---- devices ----


def feed(workspace: Workspace, names: Sequence[str], values: Sequence[Any]) -> None:
    """Feeds values to blobs, one a name."""
    for name, value in zip(names, values, strict=True):
        workspace.feed(name, value)


def run(definition: OperatorDef, inputs: Sequence[Any], device: str) -> list[Any]:
    """The outputs of one operator on a device, where nothing falls back to the CPU.

    Raises :class:`DisagreementError` if it changes an input.
    """
    workspace = Workspace(device, seed=SEED, strict=True)
    feed(workspace, definition.input, inputs)
    workspace.run_operator(definition)
    outputs = [workspace.fetch(name) for name in definition.output]
    for name, before in zip(definition.input, inputs, strict=True):
        if name not in definition.output and isinstance(before, np.ndarray):
            after = workspace.fetch(name)
            same = np.array_equal(after, before, equal_nan=_is_float(before))
            if not same:
                raise DisagreementError(f"[{definition.type}] input {name!r} was changed on {device}")
    return outputs


def runs_on(definition: OperatorDef, inputs: Sequence[Any], device: str) -> str | None:
    """Why a device has no kernel for the operator on these inputs; ``None`` if it has."""
    op, kind = Operator(definition), parse_device(device).kind
    if op.schema.host:
        return "bookkeeping on scalars stays on the CPU"
    specs = specs_of(inputs)
    outputs = op.infer(specs)
    if None in outputs:
        return "the shapes of its outputs depend on data: it stays on the CPU"
    return kernels.reason_against(op, kind, specs, outputs)


def check_agreement(
    type: str, got: Sequence[Any], want: Sequence[Any], least: float = 0.0, tolerance: float | None = None
) -> float:
    """Compares outputs of a device with those of the CPU.

    Whole numbers, truth values and random bits must be equal; floats may differ by :data:`TOLERANCE`,
    relative to the value and to the largest finite value of the tensor (sums lose what is small beside their
    largest terms).

    Args:
        type: the operator.
        got: outputs of the device.
        want: outputs of the CPU.
        least: the least tolerance, for operators that lose digits.
        tolerance: in place of :data:`TOLERANCE`.

    Returns:
        The largest difference, as a part of what is allowed.

    Raises:
        DisagreementError: they differ by more; with output, element and values.
    """
    worst = 0.0
    for o, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b, where = np.asarray(a), np.asarray(b), f"output {o} of {type}"
        if (np.shape(a), a.dtype) != (np.shape(b), b.dtype):
            raise DisagreementError(f"{where} is {a.dtype} {a.shape}, wanted {b.dtype} {b.shape}")
        if b.size == 0:
            continue
        random = schema.lookup(type).random and type not in _ROUNDED
        if not is_float(b.dtype) or random:
            different = np.asarray(~((a == b) | ((a != a) & (b != b))))
        else:
            bound = max(TOLERANCE[b.dtype.name] if tolerance is None else tolerance, least)
            eps = float(float_limits(b.dtype).eps)
            a, b = a.astype(np.float64), b.astype(np.float64)
            largest = np.abs(b[np.isfinite(b)]).max(initial=0)
            with np.errstate(invalid="ignore"):
                distance = np.abs(a - b)
            equal = (a == b) | (np.isnan(a) & np.isnan(b))
            distance = np.where(equal, 0.0, distance)
            allowed = bound * np.abs(b) + bound * largest + eps
            with np.errstate(invalid="ignore"):
                different = np.asarray(~equal & ~((distance <= allowed) & np.isfinite(b)))
                worst = max(worst, float(np.nan_to_num(distance / allowed, nan=0.0).max()))
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            raise DisagreementError(
                f"{where}: {int(different.sum())} of {b.size} elements differ, the first at {at}: {a[at]!s}, "
                f"wanted {b[at]!s}"
            )
    return worst


def gradient_steps(
    definition: OperatorDef, inputs: Sequence[Any], *, of: Sequence[str] | None = None, may_fail: bool = False
) -> Iterator[tuple[OperatorDef, list[Any]]]:
    """The operators of the gradient, each with the inputs that it finds after the ones before, on the CPU.

    Args:
        definition: the operator.
        inputs: what its inputs hold.
        of: outputs that have a gradient; by default :func:`loss_outputs`. Those that are no floats have none.
        may_fail: whether to end quietly where the gradient refuses the arguments.
    """
    workspace = Workspace("cpu", seed=SEED)
    feed(workspace, definition.input, inputs)
    workspace.run_operator(definition)
    rng = np.random.default_rng(6)
    made = [n for n in (loss_outputs(definition) if of is None else of) if _is_float(workspace.fetch(n))]
    for name in made:
        y = workspace.fetch(name)
        workspace.feed(f"{name}_grad", np.asarray(rng.uniform(0.5, 1.5, y.shape)).astype(y.dtype))
    try:
        steps = gradient_ops(definition, {name: f"{name}_grad" for name in made})[0] if made else []
        for step in steps:
            before = [workspace.fetch(name) for name in step.input]
            workspace.run_operator(step)
            yield step, before
    except GpunetError:
        if not may_fail:
            raise


def compare_devices(
    definition: OperatorDef, inputs: Sequence[Any], device: str, least: float = 0.0
) -> float | None:
    """Runs one operator on a device and on the CPU; see :func:`check_agreement`.

    Returns ``None`` where the device has no kernel for it.
    """
    if runs_on(definition, inputs, device) is not None:
        return None
    want = run(definition, _copies(inputs), "cpu")
    return check_agreement(definition.type, run(definition, _copies(inputs), device), want, least)


def inplace_definitions(definition: OperatorDef, inputs: Sequence[Any]) -> Iterator[OperatorDef]:
    """The definition with one output over an input, for each pair that the schema allows and that fits."""
    op = Operator(definition)
    specs, outputs = specs_of(inputs), op.infer(specs_of(inputs))
    for i, o in sorted(op.schema.inplace):
        if i >= len(specs) or o >= len(outputs) or op.outputs[o] in op.inputs:
            continue
        x, y = specs[i], outputs[o]
        if not (isinstance(x, TensorSpec) and isinstance(y, TensorSpec)):
            continue
        if (x.nbytes, x.dtype) == (y.nbytes, y.dtype) and op.inputs.count(op.inputs[i]) == 1:
            result = OperatorDef()
            result.CopyFrom(definition)
            result.output[o] = definition.input[i]
            yield result


def compare_inplace(definition: OperatorDef, inputs: Sequence[Any], device: str) -> float:
    """Runs one operator in place, in all ways that it allows, and compares with results on the CPU that are
    not; see :func:`check_agreement`.
    """
    want = run(definition, _copies(inputs), "cpu")
    worst = 0.0
    for changed in inplace_definitions(definition, inputs):
        got = run(changed, _copies(inputs), device)
        try:
            worst = max(worst, check_agreement(definition.type, got, want))
        except DisagreementError as error:
            over = [
                (i, o) for o, y in enumerate(changed.output) for i, x in enumerate(changed.input) if x == y
            ]
            raise DisagreementError(f"with outputs over inputs, (input, output) in {over}: {error}") from None
    return worst


def _copies(values: Sequence[Any]) -> list[Any]:
    return [x.copy() if isinstance(x, np.ndarray) else x for x in values]


@contextmanager
def thread_orders(device: str) -> Iterator[None]:
    """Within, the simulated device runs each launch in three orders of its threads and compares the results.

    A result that depends on the order (a barrier is missing) is a :class:`KernelError`.
    """
    from gpunet.cuda_kernels.sim_backend import SimBackend

    found = backend(parse_device(device))
    if not isinstance(found, SimBackend):
        raise KernelError(f"the order of threads can be checked on a simulated device, found {found.device}")
    before, found.check_order = found.check_order, True
    try:
        yield
    finally:
        found.check_order = before

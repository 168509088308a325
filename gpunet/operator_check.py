"""Checks of an operator on inputs of several shapes: what ``gpunet check-grad`` shows."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from gpunet import gradient_check, schema
from gpunet.definitions import make_operator
from gpunet.devices import parse_device
from gpunet.dtypes import as_dtype, is_float
from gpunet.errors import DataTypeError, GpunetError, SchemaError, ShapeError
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec

OK: Final = "ok"
FAILED: Final = "failed"
SKIPPED: Final = "-"

#: Shapes for operators that take any: within a block, not a multiple of anything, beyond a block, empty; and
#: other types of floats.
_SHAPES: Final = ("7", "4x5", "2x3x4x5", "1031", "0x3", "float16:3x11", "bfloat16:3x11", "float64:3x11")
#: Inputs and arguments of operators whose inputs differ in shape; see :func:`parse_inputs`.
_SAMPLES: Final[dict[str, tuple[tuple[str, dict[str, Any]], ...]]] = {
    "AveragePool": (("2x3x7x6", {"kernel": 3, "stride": 2}), ("2x3x5", {"kernels": [2]})),
    "AveragePool1D": (("2x3x7", {"kernels": [2]}),),
    "AveragePool2D": (("2x3x7x6", {"kernels": [3, 2]}),),
    "AveragePool3D": (("1x2x4x5x3", {"kernels": [2, 2, 2]}),),
    "BatchGather": (("3x5x2 int32:4", {}),),
    "BatchMatMul": (("3x4x6 3x6x5", {}), ("2x5x3 2x5x4", {"trans_a": 1})),
    "Cast": (("4x5", {"to": "double", "from_type": "double"}),),
    "Concat": (("2x3x4 2x5x4", {"axis": 1}), ("7 5", {"axis": 0})),
    "Conv": (
        ("2x3x6x5 4x3x3x3 4", {"kernel": 3, "pad": 1}),
        ("1x4x7x7 6x2x3x3 6", {"kernel": 3, "stride": 2, "group": 2}),
    ),
    "Conv1D": (("2x3x9 4x3x3 4", {"kernels": [3]}),),
    "Conv2D": (("2x3x6x5 4x3x3x3 4", {"kernels": [3, 3]}),),
    "Conv3D": (("1x2x4x4x4 3x2x2x2x2 3", {"kernels": [2, 2, 2]}),),
    "ConvTranspose": (
        ("2x4x3x4 4x3x3x3 3", {"kernel": 3, "stride": 2, "pad": 1, "adj": 1}),
        ("1x4x4x3 4x2x2x2 4", {"kernel": 2, "stride": 2, "group": 2}),
    ),
    "CrossEntropy": (("+6x5 +6x5", {}),),
    "DepthConcat": (("2x3x4x4 2x5x4x4", {}),),
    "Dropout": (("40x30", {"ratio": 0.3}),),
    "FC": (("4x6 5x6 5", {}), ("1x3 7x3 7", {})),
    "FCTransposed": (("4x6 6x5 5", {}),),
    "GroupNorm": (("2x6x3x4 6 6", {"group": 3}),),
    "InstanceNorm": (("2x3x4x5 3 3", {}),),
    "LRN": (("2x6x3x4", {"size": 3, "alpha": 0.5, "beta": 0.75}),),
    "LabelCrossEntropy": (("+6x5 int32:6", {}),),
    "LayerNorm": (("4x6", {}), ("2x3x5 5 5", {"axis": 2, "elementwise_affine": 1})),
    "MatMul": (("4x6 6x5", {}), ("6x4 5x6", {"trans_a": 1, "trans_b": 1})),
    "MaxPool": (("2x3x7x6", {"kernel": 3, "stride": 2}), ("2x3x9", {"kernels": [2]})),
    "MaxPool1D": (("2x3x7", {"kernels": [2]}),),
    "MaxPool2D": (("2x3x7x6", {"kernels": [3, 2]}),),
    "MaxPool3D": (("1x2x4x5x3", {"kernels": [2, 2, 2]}),),
    "SoftmaxWithLoss": (("6x5 int32:6", {}), ("1x33 int32:1", {})),
    "SpatialBN": (("4x3x5x5 3 3 3 +3", {}),),
    "WeightedSum": (("4x5 1 4x5 1", {}),),
}
#: Outputs beside those that a definition must have, which the gradient or training needs.
_OUTPUTS: Final = {"Dropout": 2, "GroupNorm": 3, "LRN": 2, "SpatialBN": 5}
#: Outputs that the gradient starts from, where it is not the first.
_LOSSES: Final = {"SoftmaxWithLoss": ("out1",)}
_NOT_DERIVATIVES: Final = {
    "FloatToHalf": "it changes the type",
    "HalfToFloat": "it changes the type",
    "NegateGradient": "its gradient is not the derivative, on purpose",
}
_INPUT: Final = re.compile(r"^([+~]?)(?:(\w+):)?(scalar|\d+(?:x\d+)*)$")


@dataclass(frozen=True)
class Sample:
    """Inputs and arguments that an operator is tried on.

    Attributes:
        inputs: an array for each input.
        args: arguments of the definition.
        title: for tables.
        engine: of the definition.
    """

    inputs: Sequence[Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    engine: str = ""

    def definition(self, type: str) -> OperatorDef:
        """A definition with the outputs that it must have, in place where it must be."""
        declared = schema.lookup(type)
        count = _OUTPUTS.get(type) or sum(1 for o in declared.outputs if not o.optional)
        if declared.output_counts is not None and count not in declared.output_counts:
            count = min(declared.output_counts)
        inputs = [f"in{i}" for i in range(len(self.inputs))]
        pairs = {o: i for i, o in declared.enforce_inplace if i < len(inputs)}
        outputs = [inputs[pairs[o]] if o in pairs else f"out{o}" for o in range(count)]
        return make_operator(type, inputs, outputs, engine=self.engine, **self.args)


@dataclass(frozen=True)
class Outcome:
    """What one check said.

    Attributes:
        check: ``gradient``, a device (``cpu`` where it is only run), or ``threads on`` one.
        sample: the inputs.
        operator: the operator that ran: the checked one, or one of its gradient.
        status: :data:`OK`, :data:`FAILED` or :data:`SKIPPED`.
        error: the largest error as a part of what is allowed; ``None`` where nothing was measured.
        detail: why it failed or was skipped.
    """

    check: str
    sample: str
    operator: str
    status: str
    error: float | None = None
    detail: str = ""


def find_operator(target: str) -> str:
    """The operator type of ``TYPE`` or ``module:TYPE``; imports the module, first from the current folder.

    Raises :class:`SchemaError` if the module cannot be imported or the operator is not registered then.
    """
    module, colon, type = target.rpartition(":")
    if colon:
        name = module.removesuffix(".py").replace("/", ".").replace(os.sep, ".")
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SchemaError(f"cannot import module {name!r} of {target!r}: {error}") from error
    schema.lookup(type)
    return type


# ---- inputs ----


def parse_inputs(text: str, rng: np.random.Generator) -> list[Any]:
    """Random arrays of the shapes in a text like ``2x3x6x6 4x3x3x3 +4 int32:6 scalar``.

    Floats are normally distributed with a gap around 0, where many functions have a kink; with ``+`` they are
    between 0.5 and 1.5, with ``~`` between -0.9 and 0.9. Whole numbers are 0 or 1: labels and indices that
    are always valid.
    """
    return [_parse_input(word, rng) for word in text.replace(",", " ").split()]


def _parse_input(word: str, rng: np.random.Generator) -> Any:
    match = _INPUT.match(word)
    if match is None:
        raise ShapeError(f"cannot read the input {word!r}, wanted a shape as 2x3x4 or scalar, int32:6, +3x4")
    sign, name, sizes = match.groups()
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    try:
        dtype = as_dtype("bfloat16") if name == "bfloat16" else np.dtype(name or "float32")
    except TypeError:
        raise DataTypeError(
            f"the input {word!r} has the unknown type {name!r}, wanted float32 or int64, say"
        ) from None
    if dtype.kind in "iub":
        return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    if not is_float(dtype):
        raise DataTypeError(f"the input {word!r} is {dtype}, wanted numbers")
    if sign:
        return np.asarray(rng.uniform(*((0.5, 1.5) if sign == "+" else (-0.9, 0.9)), shape)).astype(dtype)
    normal = np.asarray(rng.standard_normal(shape))
    return np.asarray(np.where(normal < 0, normal - 0.1, normal + 0.1)).astype(dtype)


def samples(
    type: str,
    texts: Sequence[str] = (),
    args: Mapping[str, Any] | None = None,
    *,
    engine: str = "",
    seed: int = 0,
) -> list[Sample]:
    """What to try an operator on.

    Args:
        type: the operator.
        texts: inputs of one sample each, as :func:`parse_inputs` reads them; by default some that fit.
        args: arguments of the definition.
        engine: of the definition.
        seed: of the values.

    Raises:
        SchemaError: no inputs were given, and none that fit are known.
    """
    rng = np.random.default_rng(seed)
    args = dict(args or {})
    if texts:
        return [_make(text, args, engine, rng) for text in texts]
    if type in _SAMPLES:
        return [_make(text, own | args, engine, rng) for text, own in _SAMPLES[type]]
    reason, found = "", []
    for shape in _SHAPES:
        for sign in ("", "+", "~"):
            try:
                sample = _make(_same_shape(type, shape, sign), args, engine, rng)
                definition = sample.definition(type)
                Operator(definition).infer(gradient_check.specs_of(sample.inputs))
                outputs = gradient_check.run(definition, sample.inputs, "cpu")
            except GpunetError as error:
                reason = reason or str(error)
                continue
            tensors = [x for x in outputs if isinstance(x, np.ndarray)]
            if all(not is_float(x.dtype) or np.isfinite(x).all() for x in tensors):
                found.append(sample)
                break
    if not found:
        raise SchemaError(
            f"no inputs for operator {type!r} are known ({reason or 'its outputs are not finite'}), wanted "
            "shapes or arguments (--shape, --arg)"
        )
    return found


def _make(text: str, args: Mapping[str, Any], engine: str, rng: np.random.Generator) -> Sample:
    shown = " ".join([text, *(f"{name}={value}" for name, value in args.items())])
    return Sample(parse_inputs(text, rng), args, shown, engine)


def _same_shape(type: str, shape: str, sign: str) -> str:
    """Inputs of one shape for all that an operator must have."""
    words = []
    asked, _, sizes = shape.rpartition(":")
    for place in schema.lookup(type).inputs:
        if place.optional:
            break
        types = {t.name for t in place.types or ()}
        if asked and "float32" in types and asked not in types:
            raise DataTypeError(f"input {place.name} does not take {asked}")
        wanted = next((t for t in ("float32", "int32", "int64", "bool") if t in types), None)
        if wanted is None:
            raise DataTypeError(f"input {place.name} takes none of float32, int32, int64, bool")
        word = f"{sign}{shape}" if wanted == "float32" else f"{wanted}:{sizes}"
        words += [word] * (2 if place.variadic else 1)
    if asked and not any(asked in word for word in words):
        raise DataTypeError(f"no input takes {asked}")
    return " ".join(words)


# ---- checks ----


def check_operator(type: str, found: Sequence[Sample], devices: Sequence[str]) -> list[Outcome]:
    """All checks of an operator and of the operators of its gradient, on each sample.

    Args:
        type: the operator.
        found: from :func:`samples`.
        devices: ``sim:N`` and ``cuda:N``; on the simulated device the order of threads is varied too.

    Returns:
        The outcomes, samples first.
    """
    outcomes = []
    for sample in found:
        of_sample = [_gradient(type, sample)]
        of_sample += _inplace(sample.definition(type), sample.inputs, sample, "cpu")
        for device in devices:
            of_sample += _device(type, sample, device)
        if all(outcome.status == SKIPPED for outcome in of_sample):
            # Nothing has run it yet: that it runs at all is checked then.
            of_sample.insert(0, _runs(type, sample))
        outcomes += of_sample
    return outcomes


def _runs(type: str, sample: Sample) -> Outcome:
    def run() -> None:
        gradient_check.run(sample.definition(type), sample.inputs, "cpu")

    return _judge("cpu", sample, type, run)


def _judge(check: str, sample: Sample, operator: str, call: Callable[[], float | None]) -> Outcome:
    try:
        return Outcome(check, sample.title, operator, OK, call())
    except GpunetError as failure:
        return Outcome(check, sample.title, operator, FAILED, detail=str(failure))


def _gradient(type: str, sample: Sample) -> Outcome:
    declared, definition = schema.lookup(type), sample.definition(type)
    outputs = Operator(definition).infer(gradient_check.specs_of(sample.inputs))
    floats = [y for y in outputs if isinstance(y, TensorSpec) and is_float(y.dtype)]
    why = ""
    if not callable(declared.gradient):
        why = repr(declared.gradient)
    elif type in _NOT_DERIVATIVES:
        why = _NOT_DERIVATIVES[type]
    elif declared.random:
        why = "it is random: no differences can be taken"
    elif not floats:
        why = "its outputs are no floats"
    elif not any(math.prod(np.shape(x)) for x in sample.inputs):
        why = "its inputs are empty"
    if why:
        return Outcome("gradient", sample.title, type, SKIPPED, detail=why)
    of = _LOSSES.get(type)
    return _judge(
        "gradient", sample, type, lambda: gradient_check.check_gradient(definition, sample.inputs, of=of)
    )


def _inplace(definition: OperatorDef, inputs: Sequence[Any], sample: Sample, device: str) -> list[Outcome]:
    """The outcome of working in place; none where the operator, or its shapes here, do not allow it."""
    if not any(gradient_check.inplace_definitions(definition, inputs)):
        return []

    def compare() -> float:
        return gradient_check.compare_inplace(definition, inputs, device)

    return [_judge(f"in place on {device}", sample, definition.type, compare)]


def _device(type: str, sample: Sample, device: str) -> list[Outcome]:
    definition = sample.definition(type)
    steps = [(definition, list(sample.inputs))]
    if gradient_check.has_gradient(definition):
        try:
            steps += gradient_check.gradient_steps(definition, sample.inputs, of=_LOSSES.get(type))
        except GpunetError as error:
            return [Outcome(device, sample.title, type, FAILED, detail=f"gradient on the CPU: {error}")]
    outcomes = []
    for step, inputs in steps:

        def compare(step: OperatorDef = step, inputs: list[Any] = inputs) -> float | None:
            return gradient_check.compare_devices(step, inputs, device)

        def reorder(step: OperatorDef = step, inputs: list[Any] = inputs) -> None:
            with gradient_check.thread_orders(device):
                gradient_check.run(step, inputs, device)

        why = gradient_check.runs_on(step, inputs, device)
        if why is not None:
            outcomes.append(Outcome(device, sample.title, step.type, SKIPPED, detail=why))
            continue
        outcomes.append(_judge(device, sample, step.type, compare))
        if parse_device(device).kind == "sim":
            outcomes.append(_judge(f"threads on {device}", sample, step.type, reorder))
        outcomes += _inplace(step, inputs, sample, device)
    return outcomes

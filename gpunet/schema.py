"""Schemas: the device-free declaration of an operator.

One declaration an operator type, made with :func:`register` in ``gpunet/operators/<family>.py``. Validation,
shape inference, gradients, memory planning, the profiler and the documentation all read it; nothing else
describes an operator.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from gpunet.dtypes import BFLOAT16
from gpunet.errors import DataTypeError, SchemaError
from gpunet.specs import BlobSpec, TensorSpec

if TYPE_CHECKING:
    from gpunet.arguments import Arg
    from gpunet.gradient_maker import GradientBuilder
    from gpunet.operator import Operator
    from gpunet.proto import OperatorDef

Types: TypeAlias = frozenset[np.dtype]


def _types(*names: str) -> Types:
    return frozenset(np.dtype(name) for name in names)


#: Sets of element types for :class:`Input`. bfloat16 is in them where ml_dtypes is installed.
FLOATS: Final = _types("float16", "float32", "float64") | (frozenset() if BFLOAT16 is None else {BFLOAT16})
INTEGERS: Final = _types("int8", "uint8", "int16", "uint16", "int32", "int64")
INDICES: Final = _types("int32", "int64")
BOOL: Final = _types("bool")
NUMBERS: Final = FLOATS | INTEGERS
STRINGS: Final = frozenset([np.dtype(object)])
ANY_TENSOR: Final = NUMBERS | BOOL | STRINGS


@dataclass(frozen=True)
class Input:
    """One input of an operator: its name in messages and documentation, and the element types it takes.

    ``types`` is a set of NumPy types; ``None`` accepts any blob, tensors and opaque objects alike.
    ``optional`` inputs come last; a ``variadic`` one is the last and stands for any number more (none
    included where it is also ``optional``). Of one that is ``shape_only`` the elements are not read.
    """

    name: str
    doc: str = ""
    types: Types | None = ANY_TENSOR
    optional: bool = False
    variadic: bool = False
    shape_only: bool = False


@dataclass(frozen=True)
class Output:
    """One output of an operator.

    Optional outputs come last and are computed only where the definition names them.
    """

    name: str
    doc: str = ""
    optional: bool = False
    variadic: bool = False


#: From the operator and the specs of its inputs to those of its outputs. May return more specs than the
#: definition has outputs (optional ones); ``None`` stands for an output whose shape depends on data (dynamic
#: operators only).
InferFunction: TypeAlias = Callable[["Operator", Sequence[Any]], Sequence[BlobSpec | None]]
GradientFunction: TypeAlias = Callable[["GradientBuilder"], Sequence["OperatorDef"]]
FlopsFunction: TypeAlias = Callable[["Operator", Sequence[Any], Sequence[Any]], int]
CheckFunction: TypeAlias = Callable[["Operator"], None]
#: True of every definition, or of those that the function picks.
Property: TypeAlias = bool | Callable[["Operator"], bool]
#: From the operator and the number of dimensions of its tensors to one of these.
AxisFunction: TypeAlias = Callable[["Operator", int], int]
#: Positions of inputs and of outputs.
Places: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class GradientRule:
    """A marker in place of a gradient function."""

    def __init__(self, meaning: str) -> None:
        self.meaning = meaning

    def __repr__(self) -> str:
        return self.meaning


#: The operator has no gradient and the backward pass silently stops at it (fills, comparisons, StopGradient).
NO_GRADIENT: Final = GradientRule("no gradient")
#: Asking for the gradient is an error (optimizer updates, gradient operators).
NOT_DIFFERENTIABLE: Final = GradientRule("not differentiable")


class _AllPairs(frozenset[tuple[int, int]]):
    def __contains__(self, pair: object) -> bool:
        return True


#: Any output may be written in place of any input.
ALL_INPLACE: Final = _AllPairs()


@dataclass(frozen=True)
class OpSchema:
    """All that is known of an operator type without a device. See :func:`register` for the fields."""

    type: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    infer: InferFunction
    args: tuple[Arg, ...] = ()
    inplace: frozenset[tuple[int, int]] = frozenset()
    enforce_inplace: tuple[tuple[int, int], ...] = ()
    gradient: GradientFunction | GradientRule = NOT_DIFFERENTIABLE
    flops: FlopsFunction | None = None
    check: CheckFunction | None = None
    random: bool = False
    dynamic: Property = False
    host: bool = False
    chain: str = ""
    elementwise: Property = False
    total: str = ""
    view: bool = False
    joins: AxisFunction | None = None
    packs: int | None = None
    cuts: AxisFunction | None = None
    channels: Places | Callable[[Operator], Places] | None = None
    compares: bool = False
    input_counts: frozenset[int] | None = None
    output_counts: frozenset[int] | None = None
    doc: str = ""
    arg_table: dict[str, Arg] = field(default_factory=dict, repr=False)

    def input_at(self, index: int) -> Input:
        """The declaration that covers input ``index`` (the last one, where it is variadic)."""
        return self.inputs[min(index, len(self.inputs) - 1)]

    def input_label(self, index: int) -> str:
        """How messages name input ``index``: as declared, and numbered where it is one of any number."""
        declared = self.input_at(index)
        return f"{declared.name}[{index - len(self.inputs) + 1}]" if declared.variadic else declared.name

    def output_label(self, index: int) -> str:
        """How messages name output ``index``."""
        declared = self.output_at(index)
        return f"{declared.name}[{index - len(self.outputs) + 1}]" if declared.variadic else declared.name

    def output_at(self, index: int) -> Output:
        """The declaration that covers output ``index`` (the last one, where it is variadic)."""
        return self.outputs[min(index, len(self.outputs) - 1)]

    def is_dynamic(self, op: Operator) -> bool:
        """Whether output shapes of this definition depend on data."""
        return self.dynamic(op) if callable(self.dynamic) else self.dynamic

    def is_elementwise(self, op: Operator) -> bool:
        """Whether this definition gives at each position a function of what it reads there."""
        return self.elementwise(op) if callable(self.elementwise) else self.elementwise

    def channel_places(self, op: Operator) -> Places | None:
        """The inputs and outputs of this definition that have channels; ``None`` where that is not known."""
        if self.channels is None:
            return None
        inputs, outputs = self.channels(op) if callable(self.channels) else self.channels
        return inputs, tuple(o for o in outputs if o < len(op.outputs))

    def validate(self, op: Operator) -> None:
        """Checks numbers of inputs and outputs, in-place pairs and the schema's own rule; raises
        :class:`SchemaError`.
        """
        _check_count("input", len(op.inputs), self.inputs, self.input_counts)
        _check_count("output", len(op.outputs), self.outputs, self.output_counts)
        for o, name in enumerate(op.outputs):
            if name in op.inputs and not any(
                (i, o) in self.inplace for i, x in enumerate(op.inputs) if x == name
            ):
                raise SchemaError(
                    f"output {self.output_at(o).name} ({name!r}) would overwrite an input in place, "
                    f"allowed in-place pairs (input, output) are {sorted(self.inplace) or 'none'}"
                )
        if len(set(filter(None, op.outputs))) != len([name for name in op.outputs if name]):
            raise SchemaError(f"outputs {list(op.outputs)} name a blob twice, wanted distinct names")
        for i, o in self.enforce_inplace:
            if i < len(op.inputs) and o < len(op.outputs) and op.inputs[i] != op.outputs[o]:
                raise SchemaError(
                    f"output {self.output_label(o)} must be in place of input {self.input_label(i)}: "
                    f"found {op.outputs[o]!r} and {op.inputs[i]!r}, wanted one name"
                )
        if self.check is not None:
            self.check(op)

    def check_types(self, op: Operator, specs: Sequence[BlobSpec | None]) -> None:
        """Checks each known input against the types that the schema takes; raises :class:`DataTypeError`."""
        for i, found in enumerate(specs):
            declared = self.input_at(i)
            if found is None or declared.types is None:
                continue
            if not isinstance(found, TensorSpec) or found.dtype not in declared.types:
                wanted = ", ".join(sorted("string" if t.hasobject else t.name for t in declared.types))
                raise DataTypeError(
                    f"input {self.input_label(i)} ({op.inputs[i]!r}) is {found}, wanted one of {wanted}"
                )


def _check_count(
    what: str, found: int, declared: Sequence[Input] | Sequence[Output], counts: Collection[int] | None
) -> None:
    fewest = sum(1 for d in declared if not d.optional)
    unbounded = bool(declared) and declared[-1].variadic
    if counts is not None:
        fits, wanted = found in counts, " or ".join(map(str, sorted(counts)))
    elif unbounded:
        fits, wanted = found >= fewest, f"at least {fewest}"
    else:
        fits = fewest <= found <= len(declared)
        wanted = str(fewest) if fewest == len(declared) else f"{fewest} to {len(declared)}"
    if not fits:
        names = ", ".join(d.name + ("..." if d.variadic else "?" if d.optional else "") for d in declared)
        raise SchemaError(
            f"has {found} {what}{'' if found == 1 else 's'}, wanted {wanted} ({names or 'none'})"
        )


_schemas: dict[str, OpSchema] = {}


def register(
    type: str,
    *,
    inputs: Iterable[Input] = (),
    outputs: Iterable[Output] = (),
    infer: InferFunction,
    args: Iterable[Arg] = (),
    inplace: Collection[tuple[int, int]] = (),
    enforce_inplace: Iterable[tuple[int, int]] = (),
    gradient: GradientFunction | GradientRule = NOT_DIFFERENTIABLE,
    flops: FlopsFunction | None = None,
    check: CheckFunction | None = None,
    random: bool = False,
    dynamic: Property = False,
    host: bool = False,
    chain: str = "",
    elementwise: Property = False,
    total: str = "",
    view: bool = False,
    joins: AxisFunction | None = None,
    packs: int | None = None,
    cuts: AxisFunction | None = None,
    channels: Places | Callable[[Operator], Places] | None = None,
    compares: bool = False,
    input_counts: Iterable[int] | None = None,
    output_counts: Iterable[int] | None = None,
    doc: str = "",
) -> OpSchema:
    """Declares the operator ``type`` and returns its schema.

    Args:
        type: the operator's name in nets.
        inputs: in order; see :class:`Input`.
        outputs: in order; see :class:`Output`.
        infer: specs of the outputs from those of the inputs; raises ShapeError, DataTypeError or
            ArgumentError with the finding alone. It must be exact: what it says is what gets allocated.
        args: typed arguments (``gpunet.arguments``). Arguments that a definition has beyond these are kept
            and ignored.
        inplace: pairs (input, output) that may share one blob. Kernels must be right when these alias.
        enforce_inplace: pairs that must share one blob.
        gradient: makes the gradient operators over blob names, or ``NO_GRADIENT``/``NOT_DIFFERENTIABLE``.
        flops: floating-point operations of one run, from specs; ``None`` for operators that only move data.
        check: a rule of the definition's own (a number of outputs that depends on an argument, say).
        random: draws from the random generator, so the same inputs give other outputs at the next step.
        dynamic: output shapes depend on data (or outputs are opaque objects); kernels return fresh values
            then.
        host: bookkeeping on scalars that belongs on the CPU wherever the workspace is (iteration counters,
            learning rates).
        chain: operators with the same name here run one after another, in the order of the net, on a lane of
            their own (collectives, which all ranks must enter in one order).
        elementwise: the single output is at each position a function of the inputs at that position, and
            has their shape; where there is an argument ``broadcast`` and there are two inputs, of what they
            are there when broadcast against each other. Runs of such operators are fused.
        total: ``"sum"`` or ``"mean"``, if that is what the operator gives where its output has one element:
            of all elements of its input. Such a one may end a fused run.
        view: output 0 has the elements of input 0 in the same order, and only another shape: the two may be
            one memory.
        joins: the dimension along which output 0 is the inputs one behind the other.
        packs: the first of the inputs whose elements output 0, a vector, has one input behind the other;
            the kernel may find those already there, and change them.
        cuts: the dimension along which the outputs are parts of input 0.
        channels: positions of the inputs and outputs that are images or filters with channels in dimension 1,
            and in the last one where the argument ``order`` is NHWC. On GPUs such operators may get that.
        compares: what it gives depends on which elements of its inputs are equal, as for the gradient of a
            maximum: when one of them is computed again, so are the others, to agree in their last bits.
        input_counts: the numbers of inputs allowed, where optional and variadic do not say it.
        output_counts: the same for outputs.
        doc: one paragraph with the formula.
    """
    if type in _schemas:
        raise SchemaError(f"operator {type!r} is already registered, wanted a name of its own")
    arguments = tuple(args)
    pairs = ALL_INPLACE if inplace is ALL_INPLACE else frozenset(inplace) | frozenset(enforce_inplace)
    schema = OpSchema(
        type=type,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        infer=infer,
        args=arguments,
        inplace=pairs,
        enforce_inplace=tuple(enforce_inplace),
        gradient=gradient,
        flops=flops,
        check=check,
        random=random,
        dynamic=dynamic,
        host=host,
        chain=chain,
        elementwise=elementwise,
        total=total,
        view=view,
        joins=joins,
        packs=packs,
        cuts=cuts,
        channels=channels,
        compares=compares,
        input_counts=None if input_counts is None else frozenset(input_counts),
        output_counts=None if output_counts is None else frozenset(output_counts),
        doc=doc,
        arg_table={name: arg for arg in arguments for name in (arg.name, *arg.aliases)},
    )
    _schemas[type] = schema
    return schema


def lookup(type: str) -> OpSchema:
    """The schema of an operator type; an unknown one raises :class:`SchemaError` with the nearest names."""
    schema = _schemas.get(type)
    if schema is None:
        near = difflib.get_close_matches(type, _schemas, n=3, cutoff=0.6)
        near += [name for name in _schemas if name.lower() == type.lower() and name not in near]
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise SchemaError(f"unknown operator type {type!r}{hint}")
    return schema


def is_registered(type: str) -> bool:
    """Whether there is an operator of this type."""
    return type in _schemas


def registered_types() -> list[str]:
    """Names of all registered operator types, sorted."""
    return sorted(_schemas)

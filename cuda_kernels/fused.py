"""Sources of fused elementwise operators, written when a net is compiled, and their launcher.

A source depends on the operators, their arguments, the element types and how operands are broadcast, but not
on shapes: layers of one kind share one module. Each result is rounded to its element type like in memory, and
nothing is contracted, so results are those of the operators one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.arguments import Arguments
from gpunet.broadcasting import collapse, strides_along
from gpunet.cuda_kernels import cache, sources
from gpunet.cuda_kernels.broadcast import run_along
from gpunet.cuda_kernels.launch import elementwise, prepare
from gpunet.cuda_kernels.pieces import Buffers, Launch, argument_dtype
from gpunet.cuda_kernels.signature import SUFFIXES, Kernel
from gpunet.cuda_kernels.total import launch_total, total_scratch
from gpunet.dtypes import is_float, is_half
from gpunet.errors import DeviceError
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.operators.fused import Body, read_body
from gpunet.specs import TensorSpec

Specs = Sequence[Any]

#: Formulas over the operands 0, 1, ... in the type that is computed in.
_FORMULAS: Final = {
    "Relu": "{0} < 0 ? 0 : {0}",
    "ReluGradient": "{0} > 0 ? {1} : 0",
    "Sigmoid": "1 / (1 + exp(-{0}))",
    "SigmoidGradient": "(1 - {0}) * {0} * {1}",
    "Tanh": "tanh({0})",
    "TanhGradient": "(1 - {0} * {0}) * {1}",
    "Add": "{0} + {1}",
    "Sub": "{0} - {1}",
    "Mul": "{0} * {1}",
    "Div": "{0} / {1}",
    "EQ": "{0} == {1}",
    "NE": "{0} != {1}",
    "GT": "{0} > {1}",
    "GE": "{0} >= {1}",
    "LT": "{0} < {1}",
    "LE": "{0} <= {1}",
    "And": "{0} && {1}",
    "Or": "{0} || {1}",
    "Xor": "{0} != {1}",
    "Not": "!{0}",
    "Sqr": "{0} * {0}",
    "Sqrt": "sqrt({0})",
    "Exp": "exp({0})",
    "Log": "log({0})",
    "Abs": "fabs({0})",
    # A NaN goes by its sign, and 0 stays 0 whatever dY.
    "AbsGradient": "{0} == 0 ? 0 : copysign({one}, {0}) * {1}",
    "Negative": "-{0}",
    "NegateGradient": "{0}",
    "Copy": "{0}",
    "Alias": "{0}",
    "StopGradient": "{0}",
    "HalfToFloat": "{0}",
    "Scale": "{0} * {scale}",
    # A NaN passes through; the upper limit wins where the limits are crossed.
    "Clip": "({0} < {low} ? {low} : {0}) > {high} ? {high} : ({0} < {low} ? {low} : {0})",
    "ClipGradient": "{0} > {low} && {0} < {high} ? {1} : 0",
}
_POWERS: Final = {2.0: "{0} * {0}", 1.0: "{0}", 0.5: "sqrt({0})", -1.0: "1 / {0}"}
_FOLDS: Final = {"Sum": "{0} + {1}", "Max": "larger({0}, {1})", "Min": "smaller({0}, {1})"}
#: Operators whose results are of the type of the operands without rounding.
_EXACT: Final = frozenset(
    [
        *("Relu", "ReluGradient", "Max", "Min", "Abs", "Negative", "NegateGradient"),
        *("Copy", "Alias", "StopGradient", "Clip", "ClipGradient"),
    ]
)


def written_types() -> frozenset[str]:
    """The operator types that can be written in CUDA."""
    return frozenset([*_FORMULAS, *_FOLDS, "Pow", "Cast", "FloatToHalf"])


def _computed(dtype: np.dtype) -> str:
    """The C++ type that numbers of an element type are computed in."""
    return "float" if is_half(dtype) else SUFFIXES[dtype][1]


def _rounded(text: str, target: np.dtype) -> str:
    """A number as it is left in memory by a type that is not the one computed in."""
    return f"rounded_{SUFFIXES[target][0]}({text})" if is_half(target) else text


def _literal(value: float, dtype: np.dtype) -> str:
    if dtype == np.float64:
        text, suffix = f"{value:.17g}", ""
    else:
        text, suffix = f"{np.float32(value):.9g}", "f"
    return f"{text if '.' in text or 'e' in text else text + '.0'}{suffix}"


def _constants(op: Operator, dtype: np.dtype) -> dict[str, str]:
    if not is_float(dtype):
        return {}
    values = {"one": 1.0}
    if op.type == "Scale":
        values["scale"] = op.args.scale
    if op.type in ("Clip", "ClipGradient"):
        dtype = argument_dtype(dtype)
        info = np.finfo(dtype)
        for name, given, default in (("low", op.args.min, info.min), ("high", op.args.max, info.max)):
            values[name] = float(dtype.type(default if given is None else given))
    return {name: _literal(value, dtype) for name, value in values.items()}


def _formula(op: Operator, body: Body) -> str:
    """The result of an operator of the body, over the names in the body."""
    names, source = op.inputs, body.specs[op.inputs[0]].dtype
    target = body.specs[op.outputs[0]].dtype
    if getattr(op.args, "epsilon", 0) > 0:
        text = _guarded(op, names, source)
    elif op.type in _FOLDS:
        text = names[0]
        for name in names[1:]:
            text = _FOLDS[op.type].format(text, name)
    elif op.type == "Pow":
        text = _power(op, source).format(*names)
    elif op.type in ("Cast", "FloatToHalf"):
        return _conversion(op, names[0], source, target)
    else:
        text = _FORMULAS[op.type].format(*names, **_constants(op, source))
    return text if op.type in _EXACT else _rounded(text, target)


def _power(op: Operator, source: np.dtype) -> str:
    return _POWERS.get(op.args.exponent, f"pow({{0}}, {_literal(op.args.exponent, source)})")


def _guarded(op: Operator, names: Sequence[str], source: np.dtype) -> str:
    """The formula of an operator with an ``epsilon`` above 0."""
    epsilon = _literal(float(argument_dtype(source).type(op.args.epsilon)), source)
    if op.type == "Div":
        # As divided by an infinity: 0 with the sign of the numerator.
        return "fabs({1}) <= {2} ? {0} * 0 : {0} / {1}".format(*names, epsilon)
    raised = f"({names[0]} < {epsilon} ? {epsilon} : {names[0]})"
    return (_power(op, source) if op.type == "Pow" else _FORMULAS[op.type]).format(raised)


def _conversion(op: Operator, name: str, source: np.dtype, target: np.dtype) -> str:
    if source == target:
        return name
    if target == np.bool_:
        return f"{name} != 0"
    if not is_half(target):
        return f"({_computed(target)}){name}"
    if op.type == "FloatToHalf" and op.args.clip:
        limit = _literal(65504.0, source)
        return _rounded(f"{name} > {limit} ? {limit} : {name} < -{limit} ? -{limit} : {name}", target)
    return _rounded(name if is_float(source) else f"(float){name}", target)


@dataclass(frozen=True)
class _Access:
    """How a kernel finds the element of an operand at a position.

    Attributes:
        kind: ``full`` (at the position), ``scalar``, ``along`` or ``strided`` (``include/broadcast.cuh``).
        scalars: what it is launched with for that: (inner, count), or a stride for each dimension.
    """

    kind: str
    scalars: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generated:
    """A kernel for a fused operator.

    Attributes:
        module, name, source: of the kernel.
        parameters: as a kernel is declared with.
        indexing: the values of the parameters between ``n`` and the divisor.
        packs: elements that a thread moves at once.
    """

    module: str
    name: str
    source: str
    parameters: str
    indexing: tuple[int, ...]
    packs: int


def _accesses(body: Body) -> tuple[list[_Access], list[int]]:
    """How each operand is read, and the sizes of the dimensions of the strided ones but the first."""
    runs = [run_along(operand, body.shape) for operand in body.operands]
    strided = [o for o, run in zip(body.operands, runs, strict=True) if run is None]
    groups = collapse(body.shape, *(strides_along(o, body.shape) for o in strided)) if strided else []
    found = []
    number = 0
    for operand, run in zip(body.operands, runs, strict=True):
        if operand == body.shape:
            found.append(_Access("full"))
        elif run is None:
            found.append(_Access("strided", tuple(strides[number] for _, strides in groups)))
            number += 1
        else:
            found.append(_Access("scalar") if run[1] == 1 else _Access("along", run))
    return found, [size for size, _ in groups[1:]]


def generate(op: Operator, inputs: Specs) -> Generated:
    """The kernel of a fused operator for inputs of these types."""
    body = read_body(op, inputs)
    accesses, sizes = _accesses(body)
    types = [*body.operators, *([body.total] if body.total else [])]
    shown = [t.type.lower() for t in types[:4]] + ([f"and_{len(types) - 4}"] if len(types) > 4 else [])
    name = "_".join(["fused", *shown])
    operands = op.args.body.external_input
    widest = max(s.dtype.itemsize for s in [*(body.specs[n] for n in operands), body.specs[body.result]])
    plain = body.total is None and all(a.kind in ("full", "scalar") for a in accesses)
    packs = 16 // widest if plain else 1
    pointers = [f"const {SUFFIXES[body.specs[n].dtype][1]}* {n}" for n in operands]
    pointers.append(f"{SUFFIXES[body.specs[body.result].dtype][1]}* y")
    index = [f"n{d + 1}" for d in range(len(sizes))]
    values = list(sizes)
    for operand, access in zip(operands, accesses, strict=True):
        kinds = ("inner", "count") if access.kind == "along" else range(len(access.scalars))
        index += [f"{operand}_{k}" for k in kinds]
        values += access.scalars
    parameters = [*pointers, *(["uint8* partial"] if body.total else []), "int64 n"]
    parameters += [f"int64 {i}" for i in index] + (["double divisor"] if body.total else [])
    head = f'extern "C" __global__ void {name}({", ".join(parameters)}) {{'
    writer = _Writer(body, operands, accesses, len(sizes), packs)
    lines = ['#include "fused.cuh"', "", *writer.function(), "", head, *writer.kernel(), "}"]
    source = "\n".join(lines) + "\n"
    return Generated(
        f"fused_{cache.key(source)[:16]}", name, source, ", ".join(parameters), tuple(values), packs
    )


class _Writer:
    """Writes the parts of a source."""

    def __init__(
        self, body: Body, operands: Sequence[str], accesses: Sequence[_Access], sizes: int, packs: int
    ) -> None:
        self._body = body
        self._operands = operands
        self._accesses = dict(zip(operands, accesses, strict=True))
        self._sizes = sizes
        self._packs = packs
        self._type = SUFFIXES[body.specs[body.result].dtype][1]

    def function(self) -> list[str]:
        """A function of the operands at one position."""
        specs = self._body.specs
        given = ", ".join(f"{_computed(specs[n].dtype)} {n}" for n in self._operands)
        lines = [f"__device__ inline {_computed(specs[self._body.result].dtype)} fused({given}) {{"]
        for op in self._body.operators:
            (name,) = op.outputs
            lines.append(
                f"  const {_computed(specs[name].dtype)} {name} = {_formula(op, self._body)};  // {op.type}"
            )
        return [*lines, f"  return {self._body.result};", "}"]

    def kernel(self) -> list[str]:
        """The lines of the kernel: a loop over positions, or a sum over them."""
        scalars = [n for n in self._operands if self._accesses[n].kind == "scalar"]
        specs = self._body.specs
        lines = [f"  const {_computed(specs[n].dtype)} {n}_all = load({n}, 0);" for n in scalars]
        if self._body.total is not None:
            return [*lines, *self._sum()]
        return [*lines, *(self._packed() if self._packs > 1 or not self._indexed() else self._loops())]

    def _indexed(self) -> bool:
        return any(a.kind in ("along", "strided") for a in self._accesses.values())

    def _call(self, element: Callable[[str], str]) -> str:
        found = [f"{n}_all" if self._accesses[n].kind == "scalar" else element(n) for n in self._operands]
        return f"fused({', '.join(found)})"

    def _packed(self) -> list[str]:
        full = [n for n in self._operands if self._accesses[n].kind == "full"]
        specs, count = self._body.specs, self._packs
        aligned = " && ".join(f"aligned<{count}>({n})" for n in [*full, "y"])
        packs = [
            f"    const Pack<{SUFFIXES[specs[n].dtype][1]}, {count}> {n}_pack = load_pack<{count}>({n}, i);"
            for n in full
        ]
        return [
            f"  const int64 packs = {aligned} ? n / {count} : 0;",
            "  GPUNET_LOOP(i, packs) {",
            *packs,
            f"    Pack<{self._type}, {count}> result;",
            f"    for (int k = 0; k < {count}; ++k) store(result.v, k, "
            f"{self._call(lambda n: f'load({n}_pack.v, k)')});",
            f"    store_pack<{count}>(y, i, result);",
            "  }",
            f"  GPUNET_LOOP(j, n - packs * {count}) {{",
            f"    const int64 i = packs * {count} + j;",
            f"    store(y, i, {self._call(lambda n: f'load({n}, i)')});",
            "  }",
        ]

    def _element(self, index: str) -> tuple[list[str], str]:
        """Statements that find the elements at position ``at``, and the call with them; ``index`` is the type
        of whole numbers.
        """
        strided = [n for n in self._operands if self._accesses[n].kind == "strided"]
        lines = [f"const {index} i = ({index})at;"] if self._indexed() else []
        if strided:
            lines += [f"{index} rest = i, next;", *(f"int64 {n}_at = 0;" for n in strided)]
            for d in range(self._sizes, 0, -1):
                lines.append(f"next = rest / ({index})n{d};")
                lines += [f"{n}_at += (rest - next * ({index})n{d}) * {n}_{d};" for n in strided]
                lines.append("rest = next;")
            lines += [f"{n}_at += rest * {n}_0;" for n in strided]

        def element(name: str) -> str:
            kind = self._accesses[name].kind
            if kind == "full":
                return f"load({name}, at)"
            if kind == "strided":
                return f"load({name}, {name}_at)"
            return (
                f"load({name}, along<{index}>(i, ({index})n, ({index}){name}_inner, ({index}){name}_count))"
            )

        return lines, self._call(element)

    def _loops(self) -> list[str]:
        lines = []
        # Divisions of 32 bits are several times as fast.
        for opening, index in (("  if (n <= GPUNET_NARROW) {", "uint32"), ("  } else {", "int64")):
            found, call = self._element(index)
            lines += [opening, "    GPUNET_LOOP(at, n) {", *(f"      {line}" for line in found)]
            lines += [f"      store(y, at, {call});", "    }"]
        return [*lines, "  }"]

    def _sum(self) -> list[str]:
        lines = [
            f"  typedef Total<{self._type}>::type A;",
            "  const auto finish = [=](A total) -> A { return divisor == 1 ? total : total / (A)divisor; };",
        ]
        branches = (("uint32", "  if (n <= GPUNET_NARROW) {"), ("int64", "  } else {"))
        for index, opening in branches if self._indexed() else (("int64", "  {"),):
            found, call = self._element(index)
            lines += [opening, "    const auto element = [=](int64 at) -> A {"]
            lines += [*(f"      {line}" for line in found), f"      return {call};", "    };"]
            lines.append("    sum_grid(n, y, (A*)partial, element, finish);")
        return [*lines, "  }"]


_declared: dict[str, Kernel] = {}


def declare(made: Generated) -> Kernel:
    """The declaration of a generated kernel, made once."""
    found = _declared.get(made.module)
    if found is None:
        sources.register_source(made.module, made.source)
        found = _declared[made.module] = Kernel(made.module, made.name, made.parameters)
    return found


def source_of(op: Operator, inputs: Specs, outputs: Specs) -> str:
    """The CUDA source for a fused operator on tensors of these specs.

    Raises :class:`DeviceError` where it cannot be written.
    """
    against = _against(op, inputs, outputs)
    if against is not None:
        raise DeviceError(f"cannot write a CUDA kernel: {against}").locate(op.where)
    return generate(op, inputs).source


def _against(op: Operator, inputs: Specs, outputs: Specs) -> str | None:
    for found in [*inputs, *outputs]:
        if found.dtype not in SUFFIXES:
            return f"kernels are not made for {found.dtype}"
    body = read_body(op, inputs)
    for inner in body.operators:
        target = body.specs[inner.outputs[0]].dtype
        if inner.type not in written_types() or not (is_float(target) or target == np.bool_):
            return f"{inner.type} to {target} is not written in fused kernels"
    return None


def _scratch(op: Operator, inputs: Specs, outputs: Specs) -> Sequence[TensorSpec]:
    return total_scratch(op, inputs, outputs) if read_body(op, inputs).total is not None else ()


@kernel("FusedElementwise", device="cuda", binds=True, scratch=_scratch, against=_against)
def fused(inputs: Buffers, outputs: Buffers, args: Arguments, ctx: KernelContext) -> Launch:
    """One launch for all operators of the body; with a sum behind them two, if there are many elements."""
    made = generate(ctx.op, inputs)
    declared, body, (y,) = declare(made), read_body(ctx.op, inputs), outputs
    n = math.prod(body.shape)
    if body.total is None:
        arguments = (*inputs, y, n, *made.indexing)
        return prepare(ctx, declared, (), arguments, elementwise(n, per_thread=made.packs))
    return launch_total(
        ctx, declared, (), inputs, y, ctx.scratch[0], n, divisor=body.divisor, indexing=made.indexing
    )

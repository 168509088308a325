"""The operator that the fusion pass puts in the place of a run of elementwise operators.

Its body is a net of the operators that it replaces, over names of its own: ``x0``, ``x1``, ... for the inputs
and ``t0``, ``t1``, ... for what the operators give, each written once. Kernels read it through :class:`Body`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpunet.arguments import REQUIRED, Ints, Message
from gpunet.errors import ArgumentError
from gpunet.operator import Operator
from gpunet.proto import Argument
from gpunet.rules import want_size
from gpunet.schema import ALL_INPLACE, Input, Output, register
from gpunet.specs import Shape, TensorSpec


@dataclass(frozen=True)
class Body:
    """What a fused operator computes.

    Attributes:
        operators: those of the body, in order, without a sum at the end.
        shape: of all that they give.
        operands: shape of each input, of the rank of ``shape`` and with ones where it is broadcast.
        specs: of inputs and results, by their names in the body.
        result: name of what the last operator gives.
        total: the operator that sums ``result``, if there is one.
        divisor: what its sum is divided by.
    """

    operators: tuple[Operator, ...]
    shape: Shape
    operands: tuple[Shape, ...]
    specs: dict[str, TensorSpec]
    result: str
    total: Operator | None
    divisor: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return math.prod(self.shape)

    @property
    def uses(self) -> dict[str, int]:
        """How often each input and each result is read, the sum at the end included."""
        found = dict.fromkeys(self.specs, 0)
        for op in (*self.operators, *([self.total] if self.total else [])):
            for name in op.inputs:
                found[name] += 1
        return found


def read_body(op: Operator, inputs: Sequence[Any]) -> Body:
    """The body of a fused operator whose inputs have these types (arrays, buffers and specs have ``dtype``).

    Raises:
        ArgumentError: the number of operands does not fit, or the body is empty.
        SchemaError, ShapeError, DataTypeError: an operator of the body does not fit, located at it.
    """
    shape, net = tuple(op.args.shape), op.args.body
    rank, given = len(shape), tuple(op.args.operands)
    if len(given) != rank * len(inputs) or len(net.external_input) != len(inputs) or not net.op:
        raise ArgumentError(
            f"a body of {len(net.op)} operators and {len(net.external_input)} inputs, and arguments 'shape' "
            f"{shape} and 'operands' {given} do not fit {len(inputs)} inputs, wanted a shape for each"
        )
    operands = tuple(given[i * rank : (i + 1) * rank] for i in range(len(inputs)))
    specs = {
        name: TensorSpec(operand, x.dtype)
        for name, operand, x in zip(net.external_input, operands, inputs, strict=True)
    }
    operators = [Operator(definition, op.net_name, op.index) for definition in net.op]
    total = operators.pop() if operators[-1].schema.total else None
    for inner in operators:
        (found,) = inner.infer([specs.get(name) for name in inner.inputs])
        if not isinstance(found, TensorSpec) or found.shape != shape:
            raise ArgumentError(f"{inner.where} of the body gives {found}, wanted the shape {shape}")
        specs[inner.outputs[0]] = found
    result = operators[-1].outputs[0] if operators else ""
    if not operators or (total is not None and total.inputs != (result,)):
        raise ArgumentError(
            "a body that sums has no operator in front of the sum, wanted one that gives its input"
        )
    size = math.prod(shape)
    divides = total is not None and (
        total.schema.total == "mean" or bool(getattr(total.args, "average", False))
    )
    return Body(tuple(operators), shape, operands, specs, result, total, max(size, 1) if divides else 1)


def _infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    body = read_body(op, inputs)
    for index, operand in enumerate(body.operands):
        want_size(op, inputs, index, math.prod(operand), "that of its operand of the body")
    found = body.specs[body.result]
    if body.total is None:
        return [found]
    (total,) = body.total.infer([found])
    return [total] if isinstance(total, TensorSpec) else []


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    body = read_body(op, inputs)
    count = sum(
        inner.flops([body.specs[name] for name in inner.inputs], [body.specs[inner.outputs[0]]])
        for inner in body.operators
    )
    return count + (body.size if body.total is not None else 0)


register(
    "FusedElementwise",
    inputs=[Input("X", "what the operators read that are not of the body", variadic=True)],
    outputs=[Output("Y", "what the last operator of the body gives")],
    args=[
        Message("body", "n", REQUIRED, "the operators, as a net from x0, x1, ... to what the last one gives"),
        Ints("shape", (), "shape of what the operators give, but for a sum over all elements at the end"),
        Ints("operands", (), "shapes of the inputs in turn, with ones added to have as many dimensions"),
    ],
    inplace=ALL_INPLACE,
    infer=_infer,
    flops=_flops,
    doc="A run of elementwise operators in one pass over memory, with the results that they have one by one. "
    "The fusion pass makes it; nets do not contain it.",
)

_SYMBOLS: Final = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "Div": "/",
    "EQ": "==",
    "NE": "!=",
    "GT": ">",
    "GE": ">=",
    "LT": "<",
    "LE": "<=",
}


def expression(op: Operator) -> str:
    """What a fused operator computes, over its blobs: ``y = Relu(a + b) * c``.

    What is read several times is written as a line of its own; lines are separated by semicolons.
    """
    net = op.args.body
    texts = dict(zip(net.external_input, op.inputs, strict=True))
    uses = [name for inner in net.op for name in inner.input]
    #: Results that have to be put in parentheses as operands.
    sums: set[str] = set()
    lines = []
    for inner in net.op:
        (name,) = inner.output
        if inner.type in _SYMBOLS:
            operands = [f"({texts[n]})" if n in sums else texts[n] for n in inner.input]
            text = f" {_SYMBOLS[inner.type]} ".join(operands)
            sums.add(name)
        else:
            arguments = [f"{arg.name}={_shown(arg)}" for arg in inner.arg]
            text = f"{inner.type}({', '.join([*(texts[n] for n in inner.input), *arguments])})"
        if uses.count(name) > 1:
            lines.append(f"{name} = {text}")
            sums.discard(name)
            text = name
        texts[name] = text
    return "; ".join([*lines, f"{op.outputs[0]} = {text}"])


def _shown(arg: Argument) -> str:
    """The value of an argument: a number, or the first field that it has."""
    for field in ("f", "i", "s"):
        if arg.HasField(field):
            return f"{getattr(arg, field):g}" if field == "f" else str(getattr(arg, field))
    return "..."

"""What a net costs, from its shapes alone: operations, parameters, and the memory that it needs at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpunet.inference import infer_operator
from gpunet.net import NetLike, as_net_def, check_source, check_types
from gpunet.operator import Operator
from gpunet.specs import BlobSpec, TensorSpec


@dataclass(frozen=True)
class OperatorCost:
    """One operator of a net: specs of its outputs (``None`` where unknown), floating-point operations."""

    op: Operator
    outputs: tuple[BlobSpec | None, ...]
    flops: int | None


@dataclass(frozen=True)
class NetCost:
    """The cost of one run of a net.

    Attributes:
        operators: in order.
        parameters: specs of the blobs that stay from run to run.
        peak_bytes: the largest sum, over all operators, of the tensors that are live while it runs, and of
            the parameters. A tensor is live from the operator that first makes it to the last one that uses
            it, inputs from the start, outputs to the end. It is what a plan that gives memory back at once
            would need, without the operators' scratch; ``None`` where shapes are not known.
    """

    operators: tuple[OperatorCost, ...]
    parameters: Mapping[str, TensorSpec]
    peak_bytes: int | None

    @property
    def flops(self) -> int | None:
        """Floating-point operations of all operators; ``None`` where shapes are not known."""
        total = 0
        for cost in self.operators:
            if cost.flops is None:
                return None
            total += cost.flops
        return total

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters."""
        return sum(s.size for s in self.parameters.values())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(s.nbytes for s in self.parameters.values())


def net_cost(net: NetLike, inputs: Mapping[str, TensorSpec], parameters: Mapping[str, TensorSpec]) -> NetCost:
    """The cost of a net that reads ``inputs`` and ``parameters``.

    External inputs whose shape is in neither are allowed; what depends on them is not known then.

    Raises:
        NetError: the operators form a cycle, or are in no order of use.
        SchemaError, ArgumentError, ShapeError, DataTypeError: an operator does not fit, located at the
            operator.
    """
    definition = as_net_def(net)
    check_types(definition)
    specs: dict[str, BlobSpec | None] = dict.fromkeys(definition.external_input)
    specs.update(parameters)
    specs.update(inputs)
    costs = []
    for index, op_def in enumerate(definition.op):
        op = Operator(op_def, definition.name, index)
        for name in op.inputs:
            if name not in specs:
                check_source(definition, index, name)
                specs[name] = None
        before = [specs[name] for name in op.inputs]
        outputs = tuple(infer_operator(op, specs))
        known = all(s is not None for s in (*before, *outputs))
        costs.append(OperatorCost(op, outputs, op.flops(before, outputs) if known else None))
    sizes = {
        name: s.nbytes for name, s in specs.items() if isinstance(s, TensorSpec) and name not in parameters
    }
    peak = None
    if all(None not in cost.outputs for cost in costs):
        peak = sum(s.nbytes for s in parameters.values()) + _peak(
            [cost.op for cost in costs], sizes, set(inputs), set(definition.external_output)
        )
    return NetCost(tuple(costs), dict(parameters), peak)


def _peak(
    operators: Iterable[Operator], sizes: Mapping[str, int], inputs: set[str], outputs: set[str]
) -> int:
    operators = list(operators)
    first: dict[str, int] = dict.fromkeys(inputs, 0)
    last: dict[str, int] = {}
    for index, op in enumerate(operators):
        for name in (*op.inputs, *op.outputs):
            first.setdefault(name, index)
            last[name] = index
    last.update(dict.fromkeys(outputs.intersection(last), len(operators) - 1))
    change = [0] * (len(operators) + 1)
    for name, end in last.items():
        size = sizes.get(name, 0)
        change[first[name]] += size
        change[end + 1] -= size
    live = peak = 0
    for step in change[:-1]:
        live += step
        peak = max(peak, live)
    return peak

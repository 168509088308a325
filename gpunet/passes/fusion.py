"""Fusion: runs of elementwise operators become one operator that passes over memory once.

A group ends at an operator whose output is wanted; it takes in, one by one, the operators whose output only
the group reads. So it gives one value, stores no other, and nothing outside depends on one of its operators
and feeds another. It runs where its last operator ran: what it reads must not be overwritten before.

Schemas say which operators are elementwise, or sums over everything. On the CPU all of these can be fused; on
a GPU, those that there is a formula in CUDA for.
"""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpunet.broadcasting import align
from gpunet.definitions import make_operator
from gpunet.devices import CPU
from gpunet.dtypes import float_limits, is_float
from gpunet.graph import Graph, Node, Value
from gpunet.operator import Operator
from gpunet.operators.fused import expression
from gpunet.passes.uses import Uses, is_plain, merged_node, with_nodes
from gpunet.proto import NetDef, OperatorDef
from gpunet.specs import Shape, TensorSpec

#: Elements below which a group is not worth fusing on the CPU: tensors stay in the cache by themselves then.
CPU_ELEMENTS: Final = 1 << 18
#: What a group may have: a kernel has a few hundred registers a thread, and 4 KiB of parameters.
MAX_OPERATORS: Final = 64
MAX_INPUTS: Final = 16
#: Letters of the name of a fused operator, which is what it computes.
MAX_NAME: Final = 100

#: A value that a group reads, with the shape in which it is broadcast against the others.
_Operand = tuple[Value, Shape]


@dataclass(eq=False)
class _Group:
    """Operators to be fused.

    Attributes:
        nodes: by position, the last first.
        shape: of what they give.
        operands: what they read, by position of the reader.
    """

    last: int
    shape: Shape
    nodes: dict[int, Node] = field(default_factory=dict)
    operands: dict[int, tuple[_Operand, ...]] = field(default_factory=dict)

    def inputs(self) -> list[_Operand]:
        """What comes from outside, each once, in the order in which it is first read."""
        made = {node.outputs[0] for node in self.nodes.values()}
        found = (o for position in sorted(self.nodes) for o in self.operands[position])
        return list(dict.fromkeys(o for o in found if o[0] not in made))


def fuse(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Replaces groups of two or more operators on one device by one operator each."""
    return _Fusion(graph, kept).run()


class _Fusion:
    def __init__(self, graph: Graph, kept: Callable[[str], bool]) -> None:
        self._graph = graph
        self._uses = Uses(graph, kept)
        self._constants = {value for node in graph.nodes if node.constant for value in node.outputs}
        #: Whether there are fused kernels of operators on other devices than the CPU, by what decides it.
        self._written: dict[Hashable, bool] = {}

    def run(self) -> Graph:
        nodes: list[Node | None] = list(self._graph.nodes)
        for position in reversed(range(len(nodes))):
            node = nodes[position]
            group = None if node is None else self._grown(position, node, nodes)
            fused = None if group is None else _fused_node(group)
            if group is not None and fused is not None:
                for member in group.nodes:
                    nodes[member] = None
                nodes[position] = fused
        return with_nodes(self._graph, nodes)

    def _grown(self, last: int, node: Node, nodes: Sequence[Node | None]) -> _Group | None:
        """The group that ends at a node; ``None`` if that is no such group, or of one node."""
        group = _started(last, node)
        if group is None or not self._is_written(node, group.operands[last]):
            return None
        size, output = math.prod(group.shape), node.outputs[0]
        if size == 0 or (node.device == CPU and size < CPU_ELEMENTS) or not self._fits(group, last, output):
            return None
        grew = True
        while grew:
            grew = False
            for value in [value for value, _ in reversed(group.inputs())]:
                grew |= self._take(group, value, output, nodes)
        return group if len(group.nodes) > 1 else None

    def _take(self, group: _Group, value: Value, output: Value, nodes: Sequence[Node | None]) -> bool:
        """Takes in the operator that makes a value, if nothing speaks against it."""
        position = self._uses.writer.get(value)
        node = None if position is None else nodes[position]
        if position is None or node is None or position in group.nodes or len(group.nodes) >= MAX_OPERATORS:
            return False
        internal = self._uses.droppable(value) and all(r in group.nodes for r in self._uses.readers[value])
        operands = _operands(node, group.shape)
        if not internal or operands is None or node.device != group.nodes[group.last].device:
            return False
        if not self._is_written(node, operands):
            return False
        group.nodes[position], group.operands[position] = node, operands
        if len(group.inputs()) <= MAX_INPUTS and self._fits(group, position, output):
            return True
        del group.nodes[position], group.operands[position]
        return False

    def _is_written(self, node: Node, operands: tuple[_Operand, ...]) -> bool:
        """Whether the device has kernels for groups with such an operator in it."""
        if node.op is None or node.device == CPU or node.op.schema.total:
            return True
        specs = [value.spec for value in (*node.inputs, *node.outputs)]
        types = tuple(s.dtype for s in specs if isinstance(s, TensorSpec))
        arguments = tuple(arg.SerializeToString(deterministic=True) for arg in node.op.definition.arg)
        key = node.op.type, arguments, types, node.device.kind
        if key not in self._written:
            shape = specs[-1].shape if isinstance(specs[-1], TensorSpec) else ()
            self._written[key] = _fused_node(_Group(0, shape, {0: node}, {0: operands})) is not None
        return self._written[key]

    def _fits(self, group: _Group, position: int, output: Value) -> bool:
        """Whether what the node at ``position`` reads still holds when the group runs, and may lie where the
        group writes.
        """
        made = {node.outputs[0] for node in group.nodes.values()}
        for value, _ in group.operands[position]:
            if value in made:
                continue
            if any(w not in group.nodes for w in self._uses.writes_between(value, position, group.last)):
                return False
            if value.name == output.name and (
                value.spec != output.spec
                or any(reader > group.last for reader in self._uses.readers[value])
                or value in self._constants
            ):
                return False
        return True


def _started(position: int, node: Node) -> _Group | None:
    """A group of the last node alone: an elementwise operator, or the sum behind one."""
    if node.op is not None and node.op.schema.total:
        if not _plain(node) or not _is_total(node):
            return None
        spec = node.inputs[0].spec
        shape = spec.shape if isinstance(spec, TensorSpec) else ()
        return _Group(position, shape, {position: node}, {position: ((node.inputs[0], shape),)})
    result = node.outputs[0].spec if node.outputs else None
    if not isinstance(result, TensorSpec):
        return None
    operands = _operands(node, result.shape)
    if operands is None:
        return None
    return _Group(position, result.shape, {position: node}, {position: operands})


def _is_total(node: Node) -> bool:
    x, y = node.inputs[0].spec, node.outputs[0].spec
    return (
        isinstance(x, TensorSpec)
        and isinstance(y, TensorSpec)
        and len(node.inputs) == 1
        and y.size == 1
        and is_float(x.dtype)
    )


def _plain(node: Node) -> bool:
    """Whether the default kernel runs the operator, in every run, and makes one value of what it reads."""
    op = node.op
    single = len(node.outputs) == 1 and bool(node.inputs)
    return op is not None and is_plain(node) and not op.dynamic and single


def _operands(node: Node, shape: Shape) -> tuple[_Operand, ...] | None:
    """What an operator reads, if it gives at each position of ``shape`` a function of what it reads there."""
    op = node.op
    if op is None or not _plain(node) or not op.schema.is_elementwise(op):
        return None
    specs = [value.spec for value in (*node.inputs, *node.outputs)]
    tensors = [s for s in specs if isinstance(s, TensorSpec)]
    if len(tensors) != len(specs) or tensors[-1].shape != shape or not _numbers_fit(op, tensors):
        return None
    shapes: Sequence[Shape] = [s.shape for s in tensors[:-1]]
    if _broadcasts(op):
        *shapes, _ = align(op.args, shapes[0], shapes[1])
    elif any(s != shape for s in shapes):
        return None
    return tuple(zip(node.inputs, shapes, strict=True))


def _broadcasts(op: Operator) -> bool:
    return "broadcast" in op.schema.arg_table and len(op.inputs) == 2


def _numbers_fit(op: Operator, specs: Sequence[TensorSpec]) -> bool:
    """Whether types and arguments are such that every device computes the operator at one position alone.

    Whole numbers are converted and compared only: dividing them can fail, which names a position.
    """
    *inputs, output = ("f" if is_float(s.dtype) else s.dtype.kind for s in specs)
    takes = "fiub" if op.schema.flops is None or output == "b" else "f"
    if (
        any(kind not in takes for kind in inputs)
        or output not in "fb"
        or len({s.dtype for s in specs[:-1]}) > 1
    ):
        return False
    used = [
        v
        for name in ("scale", "exponent", "min", "max", "epsilon")
        if (v := getattr(op.args, name, None)) is not None
    ]
    return all(abs(v) <= float(float_limits(s.dtype).max) for v in used for s in specs if is_float(s.dtype))


def _fused_node(group: _Group) -> Node | None:
    """The node that does the work of a group; ``None`` where its device has no kernel for it."""
    node = group.nodes[group.last]
    last = node.op
    if last is None:
        return None
    inputs = group.inputs()
    values = tuple(value for value, _ in inputs)
    definition = make_operator(
        "FusedElementwise",
        [value.name for value in values],
        [node.outputs[0].name],
        body=_body(group, inputs),
        shape=group.shape,
        operands=[n for _, shape in inputs for n in shape],
        device_option=last.definition.device_option if last.definition.HasField("device_option") else None,
    )
    words = expression(Operator(definition, last.net_name, last.index))
    definition.name = textwrap.shorten(words, MAX_NAME, placeholder=" ...")
    return merged_node(definition, values, node)


def _body(group: _Group, inputs: Sequence[_Operand]) -> NetDef:
    names: dict[_Operand, str] = {operand: f"x{i}" for i, operand in enumerate(inputs)}
    body = NetDef(external_input=names.values())
    for position in sorted(group.nodes):
        node = group.nodes[position]
        if node.op is None:
            continue
        copy = OperatorDef(type=node.op.type, input=[names[o] for o in group.operands[position]])
        # Operands are lined up already.
        axes = ("broadcast", "axis", "axis_str", "order") if _broadcasts(node.op) else ()
        copy.arg.extend(arg for arg in node.op.definition.arg if arg.name not in axes)
        names[node.outputs[0], group.shape] = f"t{len(body.op)}"
        copy.output.append(f"t{len(body.op)}")
        body.op.append(copy)
    body.external_output.extend(body.op[-1].output)
    return body


def source_of(node: Node) -> str:
    """The CUDA source of a fused node, on whatever device it is.

    Raises :class:`DeviceError` where it cannot be written in CUDA.
    """
    module = importlib.import_module("gpunet.cuda_kernels.fused")
    specs = [value.spec for value in node.inputs], [value.spec for value in node.outputs]
    source: str = module.source_of(node.op, *specs)
    return source

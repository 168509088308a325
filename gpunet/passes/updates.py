"""Updates: a parameter update takes over the weight decay before it, so that both are one pass over memory.

``WeightedSum(grad, a, param, b)``, which the update of the same parameter alone reads and which is not kept,
and MomentumSGDUpdate or Adam become FusedMomentumSGDUpdate or FusedAdam. Results are the same bits. The CPU's
kernel would do both one after the other all the same: it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpunet.devices import CPU
from gpunet.graph import Graph, Node, Value
from gpunet.kernels import find, reason_against
from gpunet.operator import Operator
from gpunet.operators.fused_update import FUSED_UPDATES
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec


def fuse_updates(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Replaces pairs of weight decay and update by one operator each."""
    nodes: list[Node | None] = list(graph.nodes)
    writer: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    writes: dict[tuple[str, Any], list[int]] = {}
    awaited = {value for node in graph.nodes for value in node.after}
    for position, node in enumerate(graph.nodes):
        for value in node.inputs:
            readers.setdefault(value, []).append(position)
        for value in node.outputs:
            writer[value] = position
            writes.setdefault((value.name, value.device), []).append(position)

    for position, node in enumerate(graph.nodes):
        if node.device == CPU or node.op is None or node.op.type not in FUSED_UPDATES or not _plain(node):
            continue
        _, gradient, parameter = FUSED_UPDATES[node.op.type]
        value = node.inputs[gradient]
        start = writer.get(value)
        visible = kept(value.name) and value in graph.finals.get(value.name, ())
        if start is None or readers[value] != [position] or value in awaited or visible:
            continue
        decay = graph.nodes[start]
        if decay.op is None or decay.op.type != "WeightedSum" or not _plain(decay):
            continue
        if decay.device != node.device or len(decay.inputs) != 4:
            continue
        if decay.inputs[2] is not node.inputs[parameter]:
            continue
        # What the sum read must still hold when the update runs.
        between = range(start + 1, position)
        if any(w in between for v in decay.inputs for w in writes.get((v.name, v.device), ())):
            continue
        fused = _fused(node, decay, gradient)
        if fused is not None:
            nodes[start], nodes[position] = None, fused
    left = [node for node in nodes if node is not None]
    made = {value for node in left for value in node.outputs}
    # A blob that is written, but not stored any more, has no value at the end.
    finals = {name: [v for v in values if v in made] for name, values in graph.finals.items()}
    return Graph(left, graph.entries, finals)


def _plain(node: Node) -> bool:
    """Whether the default kernel runs the operator, in every run."""
    return node.op is not None and not node.constant and not node.after and not node.op.definition.engine


def _fused(node: Node, decay: Node, gradient: int) -> Node | None:
    """The node that does the work of both; ``None`` where its device has no kernel for it."""
    if node.op is None:
        return None
    values = list(node.inputs)
    values[gradient] = decay.inputs[0]
    values += [decay.inputs[1], decay.inputs[3]]
    definition = OperatorDef()
    definition.CopyFrom(node.op.definition)
    definition.type = FUSED_UPDATES[node.op.type][0]
    del definition.input[:]
    definition.input.extend(value.name for value in values)
    op = Operator(definition, node.op.net_name, node.op.index)
    specs, kind = ([v.spec for v in values], [v.spec for v in node.outputs]), node.device.kind
    types = {v.spec.dtype if isinstance(v.spec, TensorSpec) else None for v in decay.inputs}
    if len(types) != 1:  # weights of another type than the parameter are rounded elsewhere
        return None
    if op.infer(specs[0]) != specs[1] or reason_against(op, kind, *specs) is not None:
        return None
    return Node(op, tuple(values), node.outputs, node.index, node.device, find(op, kind, *specs))

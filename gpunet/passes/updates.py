"""Updates: a parameter update takes over the weight decay before it, so that both are one pass over memory.

``WeightedSum(grad, a, param, b)``, which the update of the same parameter alone reads and which is not kept,
and MomentumSGDUpdate or Adam become FusedMomentumSGDUpdate or FusedAdam. Results are the same bits. The CPU's
kernel would do both one after the other all the same: it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from gpunet.devices import CPU
from gpunet.graph import Graph, Node
from gpunet.operators.fused_update import FUSED_UPDATES
from gpunet.passes.uses import Uses, is_plain, merged_node, with_nodes
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec


def fuse_updates(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Replaces pairs of weight decay and update by one operator each."""
    nodes: list[Node | None] = list(graph.nodes)
    uses = Uses(graph, kept)
    for position, node in enumerate(graph.nodes):
        if node.device == CPU or node.op is None or node.op.type not in FUSED_UPDATES or not is_plain(node):
            continue
        _, gradient, parameter = FUSED_UPDATES[node.op.type]
        value = node.inputs[gradient]
        start = uses.writer.get(value)
        if start is None or uses.readers[value] != [position] or not uses.droppable(value):
            continue
        decay = graph.nodes[start]
        if decay.op is None or decay.op.type != "WeightedSum" or not is_plain(decay):
            continue
        if decay.device != node.device or len(decay.inputs) != 4:
            continue
        if decay.inputs[2] is not node.inputs[parameter]:
            continue
        # What the sum read must still hold when the update runs.
        if any(uses.writes_between(v, start, position) for v in decay.inputs):
            continue
        fused = _fused(node, decay, gradient)
        if fused is not None:
            nodes[start], nodes[position] = None, fused
    return with_nodes(graph, nodes)


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
    types = {v.spec.dtype if isinstance(v.spec, TensorSpec) else None for v in decay.inputs}
    if len(types) != 1:  # weights of another type than the parameter are rounded elsewhere
        return None
    return merged_node(definition, values, node)

"""Common subexpressions: what is computed twice from the same values is computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from gpunet.graph import Graph, Node, Value, overwritten


def merge_common_subexpressions(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Leaves out a node that equals an earlier one: same type, arguments, engine, device and inputs.

    Random, dynamic and in-place operators, and those whose outputs are kept or are inputs of an in-place
    operator, stay as they are.
    """
    taken = overwritten(graph.nodes)
    first: dict[Hashable, Node] = {}
    replaced: dict[Value, Value] = {}
    nodes = []
    for node in graph.nodes:
        node.inputs = tuple(replaced.get(value, value) for value in node.inputs)
        node.after = tuple(replaced.get(value, value) for value in node.after)
        if not node.repeatable or any(kept(v.name) or v in taken for v in node.outputs):
            nodes.append(node)
            continue
        original = first.setdefault(_key(node), node)
        usable = original is not node and not any(v in taken for v in original.outputs)
        if usable and len(original.outputs) == len(node.outputs):
            replaced.update(zip(node.outputs, original.outputs, strict=True))
        else:
            nodes.append(node)
    finals = {name: values for name, values in graph.finals.items() if not any(v in replaced for v in values)}
    return Graph(nodes, graph.entries, finals)


def _key(node: Node) -> Hashable:
    op = node.op
    if op is None:
        return id(node)
    arguments = tuple(sorted(arg.SerializeToString(deterministic=True) for arg in op.definition.arg))
    device = op.definition.device_option.SerializeToString(deterministic=True)
    return op.type, op.definition.engine, device, arguments, node.inputs, len(node.outputs)

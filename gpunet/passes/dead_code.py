"""Dead code: operators whose outputs nobody keeps or reads are left out."""

from __future__ import annotations

from collections.abc import Callable

from gpunet.graph import Graph, Value


def remove_dead_code(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Leaves out nodes that make only values which are not kept and not read, from the last to the first.

    Operators without outputs stay: they are run for what they do. So do collectives: whether a rank keeps
    their result must not change what the others wait for.
    """
    needed: set[Value] = {value for name, values in graph.finals.items() if kept(name) for value in values}
    nodes = []
    for node in reversed(graph.nodes):
        wanted = (
            not node.outputs
            or (node.op is not None and bool(node.op.schema.chain))
            or any(value in needed or _in_place(graph, value, kept) for value in node.outputs)
        )
        if wanted:
            needed.update(node.inputs)
            nodes.append(node)
    nodes.reverse()
    made = {value for node in nodes for value in node.outputs}
    read = {value for node in nodes for value in node.inputs}
    finals = {name: values for name, values in graph.finals.items() if any(v in made for v in values)}
    return Graph(nodes, [value for value in graph.entries if value in read], finals)


def _in_place(graph: Graph, value: Value, kept: Callable[[str], bool]) -> bool:
    """Whether the value is written over a blob that others see, even if a later write hides it again."""
    return value.name not in graph.finals and kept(value.name)

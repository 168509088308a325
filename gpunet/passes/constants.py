"""Constant folding: operators that give the same values in every run are run once."""

from __future__ import annotations

from collections.abc import Callable

from gpunet.graph import Graph, Value, overwritten


def fold_constants(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Marks nodes whose inputs are all constants (fills have none) and whose outputs are not kept and not
    overwritten.
    """
    taken = overwritten(graph.nodes)
    constants: set[Value] = set()
    for node in graph.nodes:
        if node.repeatable and all(v in constants for v in node.inputs):
            node.constant = not any(kept(v.name) or v in taken for v in node.outputs)
            if node.constant:
                constants.update(node.outputs)
    return graph

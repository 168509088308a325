"""Sharing of memory: outputs that are written over an input that nobody needs any more, and outputs that are
views of one.
"""

from __future__ import annotations

from collections.abc import Callable

from gpunet.graph import Graph, Node, Value
from gpunet.specs import TensorSpec

#: Operators whose output 0 holds the elements of input 0 in the same order.
VIEWS = frozenset(["Reshape", "Flatten", "FlattenToVec", "Squeeze", "ExpandDims"])


def share_in_place(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Lets an operator write an output over an input where its schema allows it and the input is read for the
    last time.

    Only values that are not kept share, of one size and type. Reshapes and their kind become views this way:
    there is nothing to move.
    """
    last = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
    groups: dict[Value, list[Value]] = {}
    made = {value for node in graph.nodes for value in node.outputs if not node.constant}
    for index, node in enumerate(graph.nodes):
        for o, value in enumerate(node.outputs):
            source = node.aliased(o)
            if source is None and not node.constant:
                source = _partner(node, o, index, last, groups, made, kept)
                if source is not None:
                    node.shares[o] = node.inputs.index(source)
            group = (
                groups[source] if source is not None and source in groups else [*([source] if source else [])]
            )
            group.append(value)
            for member in group:
                groups[member] = group
    return graph


def _partner(
    node: Node,
    output: int,
    index: int,
    last: dict[Value, int],
    groups: dict[Value, list[Value]],
    made: set[Value],
    kept: Callable[[str], bool],
) -> Value | None:
    op, target = node.op, node.outputs[output]
    if op is None or kept(target.name) or op.dynamic:
        return None
    taken = {node.shares.get(o) for o in range(len(node.outputs))}
    for i, source in enumerate(node.inputs):
        allowed = (i, output) in op.schema.inplace or (op.type in VIEWS and (i, output) == (0, 0))
        if not allowed or i in taken or node.inputs.count(source) > 1 or source not in made:
            continue
        group = groups.get(source, [source])
        # Nothing that lives in the same place may be read later.
        dead = all(last.get(member, -1) <= index for member in group)
        visible = any(kept(member.name) for member in group)
        if dead and not visible and source.device == target.device and _fit(source, target):
            return source
    return None


def _fit(source: Value, target: Value) -> bool:
    a, b = source.spec, target.spec
    return (
        isinstance(a, TensorSpec)
        and isinstance(b, TensorSpec)
        and a.dtype == b.dtype
        and a.size == b.size
        and not a.dtype.hasobject
    )

"""Sharing of memory: outputs that are written over an input that nobody needs any more, and outputs that are
views of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gpunet.graph import Graph, Node, Value, overwritten
from gpunet.memory_plan import ALIGNMENT
from gpunet.specs import TensorSpec


@dataclass(eq=False)
class _Place:
    """The memory of one or several values.

    Attributes:
        last: the last node that reads any of them.
        visible: whether any is kept.
        written: whether the net itself has any overwritten.
    """

    last: int
    visible: bool
    written: bool = False


def share_in_place(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Lets an operator write over an input where its schema allows it and the input is read for the last
    time.

    Only values that are not kept share, of one size and type. Reshapes and their kind become views this way:
    there is nothing to move, also where both values are read later and neither is overwritten; so do the
    parts of a Split that lie one behind the other.
    """
    taken = overwritten(graph.nodes)
    last = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
    places: dict[Value, _Place] = {}
    for index, node in enumerate(graph.nodes):
        _view_parts(node, index, places, kept)
        for o, value in enumerate(node.outputs):
            source = node.aliased(o)
            if source is None and not node.constant:
                source = _partner(node, o, index, places, kept, taken)
                if source is not None:
                    node.shares[o] = node.inputs.index(source)
            place = places.get(source) if source is not None else None
            if place is None:
                # Constants and what comes from outside are not to be overwritten.
                place = _Place(-1, visible=node.constant or source is not None)
            place.last = max(place.last, last.get(value, -1))
            place.visible |= kept(value.name)
            place.written |= value in taken
            places[value] = place
    return graph


def _view_parts(node: Node, index: int, places: dict[Value, _Place], kept: Callable[[str], bool]) -> None:
    """Makes views of the outputs of a Split whose whole nobody needs any more.

    They are parts of it in memory where all dimensions before the one that is cut have one element. A part
    that does not begin where memory planning would put a tensor is copied: kernels may want that alignment.
    """
    op, whole = node.op, node.inputs[0] if node.inputs else None
    if op is None or whole is None or op.schema.cuts is None or op.dynamic or node.constant:
        return
    place, spec = places.get(whole), whole.spec
    if place is None or place.visible or place.last > index or not isinstance(spec, TensorSpec):
        return
    if math.prod(spec.shape[: op.schema.cuts(op, spec.rank)]) != 1 or spec.dtype.hasobject:
        return
    offset = 0
    for o, part in enumerate(node.outputs):
        usable = node.aliased(o) is None and not kept(part.name) and part.device == whole.device
        if usable and part.nbytes and offset % ALIGNMENT == 0:
            node.shares[o], node.offsets[o] = 0, offset
        offset += part.nbytes


def _partner(
    node: Node,
    output: int,
    index: int,
    places: dict[Value, _Place],
    kept: Callable[[str], bool],
    written: set[Value],
) -> Value | None:
    op, target = node.op, node.outputs[output]
    if op is None or kept(target.name) or op.dynamic:
        return None
    taken = {node.shares.get(o) for o in range(len(node.outputs))}
    for i, source in enumerate(node.inputs):
        view = op.schema.view and (i, output) == (0, 0)
        place = places.get(source)
        if not (view or (i, output) in op.schema.inplace) or i in taken or node.inputs.count(source) > 1:
            continue
        if place is None or place.visible:
            continue
        both = view and not place.written and target not in written
        if (both or place.last <= index) and source.device == target.device and _fit(source, target):
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

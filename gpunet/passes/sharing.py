"""Sharing of memory: outputs that are written over an input that nobody needs any more, outputs that are
views of one, and inputs that are written where the operator that joins them would copy them to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpunet.graph import Graph, Node, Value, overwritten
from gpunet.memory_plan import ALIGNMENT
from gpunet.specs import TensorSpec


@dataclass(eq=False)
class _Place:
    """The memory of one or several values.

    Attributes:
        last: the last node that has any of them as an input.
        visible: whether any is kept.
        read: the last node that reads elements of any of them, and not only a shape.
        written: whether the net itself has any overwritten.
        nbytes: size of the first.
        held: whether it is part of another one, or has parts.
    """

    last: int
    visible: bool
    read: int = -1
    written: bool = False
    nbytes: int = 0
    held: bool = False


def share_in_place(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Lets an operator write over an input where its schema allows it and the input is read for the last
    time.

    Only values that are not kept share, of one size and type. Reshapes and their kind become views this way:
    there is nothing to move, also where both values are read later and neither is overwritten; so do the
    parts of a Split that lie one behind the other. What a Concat or a PackBucket puts one behind the other is
    written there from the start.
    """
    taken = overwritten(graph.nodes)
    last = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs}
    read = {v: index for index, node in enumerate(graph.nodes) for v in _read(node)}
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
                place = _Place(-1, visible=node.constant or source is not None, nbytes=value.nbytes)
            place.held |= o in node.offsets
            place.last = max(place.last, last.get(value, -1))
            place.read = max(place.read, read.get(value, -1))
            place.visible |= kept(value.name)
            place.written |= value in taken
            places[value] = place
        _hold_inputs(graph.nodes, index, places, kept)
    return graph


def _read(node: Node) -> list[Value]:
    """The inputs of which a node reads elements."""
    if node.op is None:
        return list(node.inputs)
    wanted = node.op.schema.inputs
    return [v for i, v in enumerate(node.inputs) if not wanted[min(i, len(wanted) - 1)].shape_only]


def _hold_inputs(
    nodes: Sequence[Node], index: int, places: dict[Value, _Place], kept: Callable[[str], bool]
) -> None:
    """Lets inputs that a node puts one behind the other lie in its output, so that there is nothing to copy.

    It must be the last one that reads them, and they must begin where memory planning would put a tensor.
    """
    node = nodes[index]
    first = _first_packed(node)
    if first is None or node.spread or node.constant or kept(node.outputs[0].name):
        return
    whole, offset = node.outputs[0], 0
    candidates: dict[int, int] = {}
    for i, value in enumerate(node.inputs[first:], first):
        place = places.get(value)
        if (
            place is not None
            and not (place.visible or place.held)
            and place.read <= index
            and place.nbytes == value.nbytes > 0
            and offset % ALIGNMENT == 0
            and node.inputs.count(value) == 1
            and _alike(value, whole)
        ):
            candidates[i] = offset
        offset += value.nbytes
    if not candidates:
        return
    end, rewritten = _later(nodes, index, {node.inputs[i] for i in candidates})
    for i, offset in candidates.items():
        value = node.inputs[i]
        if rewritten.get(value, end) < end:
            continue
        node.holds[i] = offset
        places[value].held = places[whole].held = True
        # What is written to the parts again must not meet what an operator writes over the whole.
        places[whole].visible |= value in rewritten


def _first_packed(node: Node) -> int | None:
    """The first of the inputs that output 0 has in memory one behind the other; ``None`` where it has not."""
    op = node.op
    if op is None or op.dynamic or not node.outputs or node.aliased(0) is not None:
        return None
    spec = node.outputs[0].spec
    if not isinstance(spec, TensorSpec) or spec.dtype.hasobject:
        return None
    if op.schema.joins is not None and math.prod(spec.shape[: op.schema.joins(op, spec.rank)]) == 1:
        return 0
    return op.schema.packs


def _later(nodes: Sequence[Node], index: int, parts: set[Value]) -> tuple[int, dict[Value, int]]:
    """The last node behind ``nodes[index]`` that reads its output 0, or what is written over that, and for
    each of ``parts`` the node that writes over it, if there is one.
    """
    end, rewritten = index, dict[Value, int]()
    whole = {nodes[index].outputs[0]}
    for later, node in enumerate(nodes[index + 1 :], index + 1):
        if not whole.isdisjoint(node.inputs):
            end = later
        for o, value in enumerate(node.outputs):
            source = node.aliased(o)
            if source in whole:
                whole.add(value)
            elif source in parts:
                rewritten.setdefault(source, later)
    return end, rewritten


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
        if (both or place.last <= index) and source.nbytes == target.nbytes and _alike(source, target):
            return source
    return None


def _alike(a: Value, b: Value) -> bool:
    """Whether both are tensors of the same elements on one device."""
    return (
        isinstance(a.spec, TensorSpec)
        and isinstance(b.spec, TensorSpec)
        and a.spec.dtype == b.spec.dtype
        and a.device == b.device
        and not a.spec.dtype.hasobject
    )

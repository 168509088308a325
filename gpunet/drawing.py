"""Pictures of programs: operators as boxes in the colour of their lane, blobs as edges with their shapes.

:func:`svg` needs nothing but this module: it layers the graph (the layer of a box is the longest path to it),
orders each layer by barycentres (Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical
System Structures", 1981) and writes the result. :func:`dot` leaves the layout to Graphviz.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

from gpunet.graph import Node, Value
from gpunet.program import DynamicSegment, Program, StaticSegment
from gpunet.schedule import Lane
from gpunet.specs import TensorSpec, format_shape

#: Fills of the lanes, in the order in which they first have work; then they repeat.
COLOURS: Final = (
    "#cfe3f7", "#fbdcb8", "#d3ecc6", "#f5cfd6", "#e0d4f2", "#c9ece8", "#f3ecb5", "#e3d8cf",
)  # fmt: skip
_INPUT_COLOUR: Final = "#ffffff"

#: Widths of letters, on the safe side.
_CHARACTER: Final = 6.4
_BOLD_CHARACTER: Final = 7.2
_LINE: Final = 14
_PADDING: Final = 9
_LAYER_GAP: Final = 46
_BOX_GAP: Final = 22
#: Room for an edge that passes a layer.
_PASSAGE: Final = 14
_SWEEPS: Final = 12
_MARGIN: Final = 20


@dataclass(eq=False)
class Box:
    """An operator, or a blob that is fed.

    Attributes:
        lines: the text; the first line is the operator's type.
        lane: where it runs; ``None`` for a blob.
        tip: what is shown under the pointer.
    """

    lines: list[str]
    lane: Lane | None = None
    tip: str = ""


@dataclass(frozen=True)
class Edge:
    """A tensor from the box that makes it to one that reads it; ``label`` is its shape."""

    source: Box
    target: Box
    label: str = ""
    name: str = ""


@dataclass
class Diagram:
    """Boxes, edges between them, and the lanes in the order of their first work."""

    title: str
    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)

    def colour(self, box: Box) -> str:
        """The fill of a box."""
        if box.lane is None:
            return _INPUT_COLOUR
        return COLOURS[self.lanes.index(box.lane) % len(COLOURS)]


def diagram(program: Program, parameters: Collection[str] = ()) -> Diagram:
    """What there is to draw of a program that is bound: run, or prepared.

    Args:
        program: the program.
        parameters: blobs that are named in the boxes that read them, instead of having boxes of their own.
    """
    result = Diagram(program.name or "net")
    made: dict[str, tuple[Box, Value]] = {}
    for node, lane in _scheduled(program):
        _add(result, node, lane, made, set(parameters))
    return result


def _scheduled(program: Program) -> Iterator[tuple[Node, Lane | None]]:
    """All nodes in the order of issue; constants, which run once, are in no lane."""
    for segment in program.bound():
        if isinstance(segment, StaticSegment) and segment.compiled is not None:
            yield from ((node, None) for node in segment.compiled.graph.nodes if node.constant)
            yield from ((item.node, item.lane) for item in segment.compiled.schedule.items)
        elif isinstance(segment, DynamicSegment):
            yield segment.step.node, segment.step.lane


def _add(
    result: Diagram,
    node: Node,
    lane: Lane | None,
    made: dict[str, tuple[Box, Value]],
    parameters: set[str],
) -> None:
    op = node.op
    if lane is not None and lane not in result.lanes:
        result.lanes.append(lane)
    kind = "copy" if op is None else op.type
    title = f"{kind} to {node.device}" if op is None else f"{kind} (once)" if node.constant else kind
    name = op.definition.name if op is not None and op.definition.name else ""
    box = Box([title, name or ", ".join(v.name for v in node.outputs[:2])], lane, node.where)
    keys = [_key(value) for value in node.inputs]
    for value, key in zip(node.inputs, keys, strict=True):
        if key in made:
            source, known = made[key]
            result.edges.append(Edge(source, box, _shape(value) or _shape(known), value.name))
        elif value.name in parameters:
            box.lines.append(f"{value.name} {_shape(value)}".rstrip())
        else:
            blob = Box([value.name], None, f"blob {value.name!r}, {value.spec}")
            result.boxes.append(blob)
            made[key] = blob, value
            result.edges.append(Edge(blob, box, _shape(value), value.name))
    result.boxes.append(box)
    for value in node.outputs:
        made[_key(value)] = box, value


def _key(value: Value) -> str:
    return f"{value.name}\n{value.device}"


def _shape(value: Value) -> str:
    return format_shape(value.spec.shape) if isinstance(value.spec, TensorSpec) else ""


def dot(picture: Diagram) -> str:
    """The diagram in Graphviz' language."""
    names = {id(box): f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = [
        f"digraph {_quoted(picture.title)} {{",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11];',
        '  edge [fontname="Helvetica", fontsize=9];',
    ]
    for box in picture.boxes:
        shape = ", shape=ellipse" if box.lane is None and len(box.lines) == 1 else ""
        label = _quoted("\n".join(box.lines))
        lines.append(f'  {names[id(box)]} [label={label}, fillcolor="{picture.colour(box)}"{shape}];')
    for edge in picture.edges:
        style = ", style=dashed" if _crosses(edge) else ""
        source, target = names[id(edge.source)], names[id(edge.target)]
        lines.append(f"  {source} -> {target} [label={_quoted(edge.label)}{style}];")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _crosses(edge: Edge) -> bool:
    return edge.source.lane is not None and edge.source.lane != edge.target.lane


# ---------------------------------------------------------------------------------------------------------
# Layout


@dataclass(eq=False)
class _Place:
    """A box in its layer, or (without a box) the passage of an edge through a layer."""

    layer: int
    width: float
    height: float
    box: Box | None = None
    x: float = 0.0
    y: float = 0.0
    before: list[_Place] = field(default_factory=list)
    after: list[_Place] = field(default_factory=list)


@dataclass
class _Layout:
    layers: list[list[_Place]]
    #: For each edge, the places that it goes through.
    paths: list[list[_Place]]
    width: float
    height: float


def _layout(picture: Diagram) -> _Layout:
    layers, paths = _layered(picture)
    best = [list(layer) for layer in layers]
    fewest = _crossings(layers)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers[1:] if down else layers[-2::-1]:
            wanted = {id(place): _centre(place, down) for place in layer}
            layer.sort(key=lambda place: wanted[id(place)])
            _settle(layer, [wanted[id(place)] for place in layer])
        crossings = _crossings(layers)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    layers = best
    _set_columns(layers)
    y = float(_MARGIN)
    for layer in layers:
        height = max((place.height for place in layer), default=0.0)
        for place in layer:
            place.y = y + height / 2
            if place.box is None:
                # An edge passes upright, so that it stays clear of the boxes beside it.
                place.height = height
        y += height + _LAYER_GAP
    width = max((p.x + p.width / 2 for layer in layers for p in layer), default=0.0) + _MARGIN
    return _Layout(layers, paths, width, y - _LAYER_GAP + _MARGIN)


def _layered(picture: Diagram) -> tuple[list[list[_Place]], list[list[_Place]]]:
    depth: dict[int, int] = {}
    incoming: dict[int, list[Edge]] = {}
    for edge in picture.edges:
        incoming.setdefault(id(edge.target), []).append(edge)
    for box in picture.boxes:
        # Boxes come in the order in which they run, so sources come before.
        sources = [depth[id(e.source)] for e in incoming.get(id(box), ())]
        depth[id(box)] = max(sources, default=-1) + 1
    outgoing: dict[int, list[Edge]] = {}
    for edge in picture.edges:
        outgoing.setdefault(id(edge.source), []).append(edge)
    # What has not more inputs than outputs stands as low as it can: its inputs are not longer than its
    # outputs were.
    for box in reversed(picture.boxes):
        read, given = incoming.get(id(box), ()), outgoing.get(id(box), ())
        if given and len({(id(e.source), e.name) for e in read}) <= len({e.name for e in given}):
            depth[id(box)] = max(depth[id(box)], min(depth[id(e.target)] for e in given) - 1)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    places: dict[int, _Place] = {}
    for box in picture.boxes:
        text = max(len(box.lines[0]) * _BOLD_CHARACTER, *(len(line) * _CHARACTER for line in box.lines))
        place = _Place(depth[id(box)], text + 2 * _PADDING, len(box.lines) * _LINE + 10, box)
        places[id(box)] = place
        layers[place.layer].append(place)
    paths = []
    shared: dict[tuple[int, str, int], _Place] = {}
    for edge in picture.edges:
        source, target = places[id(edge.source)], places[id(edge.target)]
        path = [source]
        for number in range(source.layer + 1, target.layer):
            # All edges of one tensor go through a layer in one place.
            key = (id(edge.source), edge.name, number)
            if key not in shared:
                shared[key] = _Place(number, _PASSAGE, 0)
                layers[number].append(shared[key])
            path.append(shared[key])
        path.append(target)
        for first, second in itertools.pairwise(path):
            if second not in first.after:
                first.after.append(second)
                second.before.append(first)
        paths.append(path)
    for layer in layers:
        x = 0.0
        for place in layer:
            place.x = x + place.width / 2
            x += place.width + _BOX_GAP
    return layers, paths


def _centre(place: _Place, down: bool) -> float:
    """The mean place of the neighbours above (``down``) or below."""
    near = place.before if down else place.after
    return statistics.fmean(n.x for n in near) if near else place.x


def _crossings(layers: Sequence[Sequence[_Place]]) -> int:
    """How many pairs of edges between neighbouring layers cross."""
    total = 0
    for layer, below in itertools.pairwise(layers):
        ranks = {id(place): rank for rank, place in enumerate(below)}
        ends: list[int] = []
        for place in layer:
            targets = sorted(ranks[id(t)] for t in place.after)
            total += sum(len(ends) - bisect.bisect_right(ends, target) for target in targets)
            for target in targets:
                bisect.insort(ends, target)
    return total


def _set_columns(layers: Sequence[list[_Place]]) -> None:
    """Moves places towards their neighbours without changing the order in a layer."""
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else layers[::-1]:
            wanted = []
            for place in layer:
                near = (place.before if down else place.after) or place.after or place.before
                # What is in no lane, blobs and constants, stands beside the others and does not lead them.
                near = [n for n in near if n.box is None or n.box.lane is not None] or near
                wanted.append(statistics.median(n.x for n in near) if near else place.x)
            _settle(layer, wanted)
    left = min((p.x - p.width / 2 for layer in layers for p in layer), default=0.0)
    for layer in layers:
        for place in layer:
            place.x += _MARGIN - left


def _settle(layer: Sequence[_Place], wanted: Sequence[float]) -> None:
    """Gives each place the nearest x to what is wanted (least squares) such that none overlap.

    Pool-adjacent-violators: places that would overlap form a block, which stands at the mean of what its
    members want.
    """
    offsets = []
    total = 0.0
    for index, place in enumerate(layer):
        if index:
            total += (layer[index - 1].width + place.width) / 2 + _BOX_GAP
        offsets.append(total)
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        block = (want - offset, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, count = blocks.pop()
            size = count + block[1]
            block = ((mean * count + block[0] * block[1]) / size, size)
        blocks.append(block)
    position = 0
    for start, count in blocks:
        for place in layer[position : position + count]:
            place.x = start + offsets[position]
            position += 1


# ---------------------------------------------------------------------------------------------------------
# SVG

_STYLE: Final = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#222}"
    ".type{font-weight:bold}.small{font-size:10px;fill:#555}"
    ".shape{font-size:9.5px;fill:#333}"
    ".edge{fill:none;stroke:#777;stroke-width:1.1}.crosses{stroke-dasharray:5 3;stroke:#b0413e}"
    ".box{stroke:#666;stroke-width:0.8}"
)


def svg(picture: Diagram) -> str:
    """The diagram as an SVG document. Edges between lanes are dashed."""
    layout = _layout(picture)
    legend = _legend(picture)
    top = 34 + 18 * (len(legend) > 0)
    legend_width = sum(len(str(lane)) * _CHARACTER + 34 for lane in picture.lanes)
    title_width = len(picture.title) * 9.0
    width = max(layout.width, legend_width + 2 * _MARGIN, title_width + 2 * _MARGIN)
    height = layout.height + top
    shift = (width - layout.width) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#777"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_MARGIN}" y="22" class="type" style="font-size:14px">{escape(picture.title)}</text>',
        *legend,
        f'<g transform="translate({shift:.1f} {top})">',
    ]
    labels: dict[tuple[float, float], list[str]] = {}
    labelled: set[tuple[int, str, str]] = set()
    for edge, path in sorted(zip(picture.edges, layout.paths, strict=True), key=lambda pair: len(pair[1])):
        parts.append(_curve(edge, path))
        key = (id(edge.source), edge.name, edge.label)
        # Once for a tensor, at its shortest edge.
        if edge.label and key not in labelled:
            labelled.add(key)
            labels.setdefault(_middle(path), []).append(edge.label)
    for layer in layout.layers:
        parts += [_box(picture, place, place.box) for place in layer if place.box is not None]
    parts += [_shape_text(", ".join(texts), x, y) for (x, y), texts in labels.items()]
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _shape_text(label: str, x: float, y: float) -> str:
    width = len(label) * 5.4 + 4
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="12" fill="#fff" '
        f'fill-opacity="0.85"/><text class="shape" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">'
        f"{escape(label)}</text>"
    )


def _ends(path: Sequence[_Place]) -> list[tuple[float, float]]:
    points = [(path[0].x, path[0].y + path[0].height / 2)]
    for place in path[1:-1]:
        points += [(place.x, place.y - place.height / 2), (place.x, place.y + place.height / 2)]
    return [*points, (path[-1].x, path[-1].y - path[-1].height / 2)]


def _middle(path: Sequence[_Place]) -> tuple[float, float]:
    (x0, y0), (x1, y1) = _ends(path)[:2]
    return (x0 + x1) / 2, (y0 + y1) / 2 + 3


def _curve(edge: Edge, path: Sequence[_Place]) -> str:
    points = _ends(path)
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        bend = (y0 + y1) / 2
        text += f"C{x0:.1f} {bend:.1f} {x1:.1f} {bend:.1f} {x1:.1f} {y1:.1f}"
    crosses = " crosses" if _crosses(edge) else ""
    tip = escape(f"{edge.name} {edge.label}".strip())
    return f'<path class="edge{crosses}" d="{text}" marker-end="url(#end)"><title>{tip}</title></path>'


def _box(picture: Diagram, place: _Place, box: Box) -> str:
    left, top = place.x - place.width / 2, place.y - place.height / 2
    operator = len(box.lines) > 1
    radius = 4 if operator else place.height / 2
    parts = [
        f'<g><title>{escape(box.tip)}</title><rect class="box" x="{left:.1f}" y="{top:.1f}" '
        f'width="{place.width:.1f}" height="{place.height:.1f}" rx="{radius:.1f}" '
        f'fill="{picture.colour(box)}"/>'
    ]
    for number, line in enumerate(box.lines):
        style = ' class="type"' if number == 0 and operator else ' class="small"' if number > 1 else ""
        y = top + _LINE * (number + 1) + 1
        parts.append(f'<text x="{place.x:.1f}" y="{y:.1f}" text-anchor="middle"{style}>{escape(line)}</text>')
    return "".join([*parts, "</g>"])


def _legend(picture: Diagram) -> list[str]:
    parts = []
    x = float(_MARGIN)
    for number, lane in enumerate(picture.lanes):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<rect class="box" x="{x:.1f}" y="32" width="12" height="12" rx="2" fill="{colour}"/>'
            f'<text x="{x + 17:.1f}" y="42">{lane}</text>'
        )
        x += len(str(lane)) * _CHARACTER + 34
    return parts

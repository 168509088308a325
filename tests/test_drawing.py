"""Drawings: what is in them, and that nothing lies on anything else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import gpunet
from gpunet.definitions import make_operator
from gpunet.drawing import COLOURS, diagram, dot, svg
from gpunet.proto import NetDef

SVG = "{http://www.w3.org/2000/svg}"


def program(net: NetDef, **options):
    """Large enough that several lanes are worth their waits."""
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.ones((400, 300), dtype=np.float32))
    ws.feed("w", np.ones((300, 300), dtype=np.float32))
    ws.create(net, without=["fusion", "common_subexpressions"], **options)
    ws.program(net.name).prepare()
    return ws.program(net.name)


def branches() -> NetDef:
    ops = [make_operator("MatMul", ["x", "w"], ["h"], name="first <one>")]
    for b in range(3):
        ops += [make_operator("Relu", ["h"], [f"a{b}"]), make_operator("Tanh", [f"a{b}"], [f"b{b}"])]
    ops.append(make_operator("Sum", ["b0", "b1", "b2", "h"], ["y"]))
    return NetDef(name='a "net" & more', op=ops, external_input=["x", "w"], external_output=["y"])


def test_boxes_and_edges():
    picture = diagram(program(branches()), ["w"])
    assert [box.lines for box in picture.boxes][:3] == [
        ["x"],
        ["MatMul", "first <one>", "w 300x300"],
        ["Relu", "a0"],
    ]
    edges = [(edge.source.lines[-1], edge.target.lines[-1], edge.label) for edge in picture.edges]
    assert ("x", "w 300x300", "400x300") in edges
    assert ("w 300x300", "y", "400x300") in edges
    assert len(edges) == 1 + 3 + 3 + 4
    assert "w" in [box.lines[0] for box in diagram(program(branches())).boxes]


def test_the_svg_is_well_formed_and_shows_all():
    picture = diagram(program(branches(), engine="dag", workers=2), ["w"])
    root = ET.fromstring(svg(picture))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for text in ('a "net" & more', "MatMul", "first <one>", "w 300x300", "Sum", "y", "400x300", "cpu lane 1"):
        assert text in texts
    paths = [element for element in root.iter(f"{SVG}path") if "edge" in element.get("class", "")]
    assert len(paths) == len(picture.edges)
    crossing = [path for path in paths if "crosses" in path.get("class")]
    assert 0 < len(crossing) < len(paths)
    fills = {element.get("fill") for element in root.iter(f"{SVG}rect")}
    assert {COLOURS[0], COLOURS[1]} <= fills


def rectangles(root: ET.Element) -> list[tuple[float, float, float, float]]:
    found = []
    for group in root.iter(f"{SVG}g"):
        for element in group.findall(f"{SVG}rect[@class='box']"):
            x, y, w, h = (float(element.get(key)) for key in ("x", "y", "width", "height"))
            found.append((x, y, x + w, y + h))
    return found


def test_no_box_lies_on_another_and_edges_go_down():
    model = gpunet.zoo.build("lenet", (1, 8, 8), 10)
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.1).apply(model)
    ws = gpunet.Workspace("cpu")
    ws.run_once(model.init_net)
    ws.feed("data", np.zeros((2, 1, 8, 8), np.float32))
    ws.feed("label", np.zeros(2, np.int32))
    found = ws.program(ws.create(model.net))
    found.prepare()
    picture = diagram(found, [p.name for p in model.params])
    root = ET.fromstring(svg(picture))
    boxes = rectangles(root)
    assert len(boxes) == len(picture.boxes) > 30
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0
        assert right <= float(root.get("width"))
        assert bottom <= float(root.get("height"))
        for other in boxes[:i]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    for path in root.iter(f"{SVG}path"):
        if "edge" in path.get("class", ""):
            numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", path.get("d"))]
            heights = numbers[1::2]
            assert heights == sorted(heights)


def test_dot():
    text = dot(diagram(program(branches(), engine="dag", workers=2), ["w"]))
    assert text.startswith('digraph "a \\"net\\" & more" {\n')
    assert '[label="MatMul\\nfirst <one>\\nw 300x300", fillcolor="#cfe3f7"]' in text
    assert '[label="x", fillcolor="#ffffff", shape=ellipse]' in text
    assert '[label="400x300"];' in text
    assert "style=dashed" in text
    assert text.count(" -> ") == 11


def test_dynamic_operators_and_constants_are_drawn():
    ops = [
        make_operator("ConstantFill", [], ["c"], shape=[4, 8], value=2.0),
        make_operator("Mul", ["x", "c"], ["m"]),
        make_operator("NumpyTile", ["m", "r"], ["t"]),
        make_operator("Relu", ["t"], ["y"]),
    ]
    net = NetDef(name="n", op=ops, external_input=["x", "r"], external_output=["y"])
    ws = gpunet.Workspace("cpu")
    ws.feed("x", np.ones((4, 8), dtype=np.float32))
    ws.feed("r", np.array([2, 1], dtype=np.int32))
    ws.create(net, without=["fusion"])
    ws.program("n").prepare()
    picture = diagram(ws.program("n"))
    assert [box.lines[0] for box in picture.boxes] == [
        "ConstantFill (once)",
        "x",
        "Mul",
        "r",
        "NumpyTile",
        "Relu",
    ]
    assert [edge.name for edge in picture.edges] == ["x", "c", "m", "r", "t"]


@pytest.mark.parametrize(
    "net", [NetDef(name="empty"), NetDef(name="one", op=branches().op[:1], external_input=["x", "w"])]
)
def test_small_nets(net):
    root = ET.fromstring(svg(diagram(program(net))))
    assert len(rectangles(root)) == (3 if net.op else 0)

"""Single layers, forward and backward, against PyTorch: convolutions (with bars) and poolings (without)."""

from __future__ import annotations

from dataclasses import replace

from . import convolution, counterpart
from .rows import Bar, Row, Samples, mean_ratio
from .timing import Effort, compare

FIGURE = "convolution"
#: Networks whose convolutions have bars, by the first word of a layer's name.
NETWORKS = ("lenet", "resnet20", "resnet18")
BARS = {"forward": Bar(0.9), "backward": Bar(1.2)}


def measure(effort: Effort) -> list[Row]:
    """Rows for each layer, then the mean ratio of each network; one layer of each if it is quick."""
    # There are many of them.
    short = replace(effort, settle=0.02, seconds=0.01, budget=effort.budget / 5, patience=effort.patience / 5)
    rows: list[Row] = []
    means: list[Row] = []
    for network in dict.fromkeys(shape.name.split()[0] for shape in convolution.shapes()):
        layers = [shape for shape in convolution.shapes() if shape.name.split()[0] == network]
        if effort.quick:
            layers = [layer for layer in layers if layer.filters > 0][1:2]
        found = [row for layer in layers for row in _layer(layer, short)]
        rows += found
        for direction, bar in BARS.items():
            judged = [row for row in found if row.bar is not None and row.case.endswith(direction)]
            if judged:
                case = f"{network}, mean of {len(judged)}, {direction}"
                means.append(mean_ratio(FIGURE, case, judged, bar))
    return rows + means


def _layer(shape: convolution.Shape, effort: Effort) -> list[Row]:
    barred = shape.filters > 0 and shape.name.split()[0] in NETWORKS
    sides = convolution.candidates(shape, counterpart.torch() if counterpart.INSTALLED else None)
    rows = []
    for direction, runs in zip(BARS, zip(*sides, strict=True), strict=True):
        result = compare(dict(zip(("gpunet", "torch"), runs, strict=False)), effort)
        own, other = (result.seconds.get(name) for name in ("gpunet", "torch"))
        rows.append(
            Row(
                FIGURE,
                f"{shape.name}, {direction}",
                own=own and Samples.of(own.values, 1e3),
                other=other and Samples.of(other.values, 1e3),
                counterpart=counterpart.NAME,
                ratios=result.ratios.get("torch"),
                bar=BARS[direction] if barred else None,
            )
        )
    return rows

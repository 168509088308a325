"""Single layers, forward and backward, against PyTorch: convolutions (with bars) and poolings (without)."""

from __future__ import annotations

from collections.abc import Sequence

from . import convolution, counterpart
from .rows import Bar, Row, Samples, mean_ratio
from .timing import Effort

FIGURE = "convolution"
#: Networks whose convolutions have bars, by the first word of a layer's name.
NETWORKS = ("lenet", "resnet20", "resnet18")
BARS = {"forward": Bar(0.9), "backward": Bar(1.2)}
#: Runs of a round, in each of which one is timed.
REPEATS = 5


def measure(effort: Effort) -> list[Row]:
    """Rows for each layer, then the mean ratio of each network; one layer of each if it is quick."""
    rows: list[Row] = []
    means: list[Row] = []
    for network in dict.fromkeys(shape.name.split()[0] for shape in convolution.shapes()):
        layers = [shape for shape in convolution.shapes() if shape.name.split()[0] == network]
        found = [row for layer in (layers[1:2] if effort.quick else layers) for row in _layer(layer, effort)]
        rows += found
        for direction, bar in BARS.items():
            judged = [row for row in found if row.bar is not None and row.case.endswith(direction)]
            if judged:
                case = f"{network}, mean of {len(judged)}, {direction}"
                means.append(mean_ratio(FIGURE, case, judged, bar))
    return rows + means


def _layer(shape: convolution.Shape, effort: Effort) -> list[Row]:
    barred = shape.filters > 0 and shape.name.split()[0] in NETWORKS
    rounds = [convolution.measure(REPEATS, [shape]) for _ in range(effort.rounds // 2)]
    return [_row(list(measured), barred) for measured in zip(*rounds, strict=True)]


def _row(measured: Sequence[convolution.Row], barred: bool) -> Row:
    """One layer in one direction, from its rounds."""
    first = measured[0]
    others = [row.torch_ms for row in measured if row.torch_ms is not None]
    ratios = [row.ratio for row in measured if row.ratio is not None]
    return Row(
        FIGURE,
        f"{first.name}, {first.direction}",
        own=Samples.of([row.gpunet_ms for row in measured]),
        other=Samples.of(others) if others else None,
        counterpart=counterpart.NAME,
        ratios=Samples.of(ratios) if ratios else None,
        bar=BARS[first.direction] if barred else None,
    )

"""What a net costs beside the work of its operators: 200 operators on tensors of eight numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gpunet

from . import counterpart
from .rows import Bar, Row, Samples
from .timing import Effort, compare

FIGURE = "overhead"
OPERATORS = 200
SIZE = 8
#: Operator, its inputs and output, and the function of NumPy and PyTorch that does the same. Values stay
#: bounded however often this runs.
PATTERN = (
    ("Add", ("a", "b"), "c", "add"),
    ("Mul", ("c", "a"), "d", "multiply"),
    ("Sub", ("d", "b"), "e", "subtract"),
    ("Tanh", ("e",), "f", "tanh"),
    ("Negative", ("f",), "g", "negative"),
    ("Exp", ("g",), "h", "exp"),
    ("Div", ("f", "h"), "i", "divide"),
    ("Abs", ("i",), "j", "absolute"),
)
BLOBS = "abcdefghij"


def measure(effort: Effort) -> list[Row]:
    """One row: microseconds an operator that the net costs more than the calls."""
    contenders: dict[str, Callable[[], object]] = {
        "gpunet": _net(),
        "numpy": _calls(np, np.full(SIZE, 0.5, np.float32), ""),
    }
    if counterpart.INSTALLED:
        torch = counterpart.torch()
        contenders["torch"] = _calls(torch, torch.full((SIZE,), 0.5), "out=")
    times = compare(contenders, effort).seconds
    numpy, factor = times["numpy"].values, 1e6 / OPERATORS
    own = Samples.of([net - calls for net, calls in zip(times["gpunet"].values, numpy, strict=True)], factor)
    rows = [
        Row(
            FIGURE,
            f"1 of {OPERATORS} operators, over NumPy's call",
            unit="µs",
            own=own,
            other=Samples.of(numpy, factor),
            counterpart="NumPy's call itself",
            bar=Bar(4.0, of_ratio=False),
        )
    ]
    if counterpart.INSTALLED:
        torches = times["torch"].values
        rows.append(
            Row(
                FIGURE,
                f"1 of {OPERATORS} operators",
                unit="µs",
                own=Samples.of(times["gpunet"].values, factor),
                other=Samples.of(torches, factor),
                counterpart="torch's call",
                ratios=Samples.of([a / b for a, b in zip(times["gpunet"].values, torches, strict=True)]),
            )
        )
    return rows


def _net() -> Callable[[], object]:
    net = gpunet.Net("tiny")
    for _ in range(OPERATORS // len(PATTERN)):
        for type_, inputs, output, _ in PATTERN:
            net.add(type_, list(inputs), [output])
    workspace = gpunet.Workspace("cpu")
    for name in "ab":
        workspace.feed(name, np.full(SIZE, 0.5, np.float32))
    created = workspace.create(net)
    return lambda: workspace.run(created)


def _calls(module: object, value: object, keyword: str) -> Callable[[], object]:
    """A function of the bare calls in a row, with nothing to look up, as if written by hand."""
    lines = [f"{name}({', '.join(inputs)}, {keyword}{output})" for _, inputs, output, name in PATTERN]
    names = ", ".join((*BLOBS, *dict.fromkeys(name for *_, name in PATTERN)))
    source = f"def calls({names}):\n" + "".join(
        f"    {line}\n" for line in lines * (OPERATORS // len(PATTERN))
    )
    scope: dict[str, Callable[..., object]] = {}
    exec(source, scope)
    arguments = [value + 0 for _ in BLOBS]  # type: ignore[operator]
    functions = [getattr(module, name) for name in dict.fromkeys(name for *_, name in PATTERN)]
    return lambda: scope["calls"](*arguments, *functions)

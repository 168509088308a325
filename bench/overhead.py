"""What a net costs beside the work of its operators: 200 operators on tensors of eight numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gpunet
from gpunet.errors import GpunetError

from . import counterpart
from .rows import Bar, Row, Samples
from .timing import Effort, compare

FIGURE = "overhead"
OPERATORS = 200
SIZE = 8
#: Operator, whether it has a second operand, which stays the same, and the function of NumPy and PyTorch.
#: Each takes the result of the one before, so that none can be left out. Values stay bounded.
PATTERN = (
    ("Add", True, "add"),
    ("Mul", True, "multiply"),
    ("Sub", True, "subtract"),
    ("Tanh", False, "tanh"),
    ("Negative", False, "negative"),
    ("Exp", False, "exp"),
    ("Div", True, "divide"),
    ("Abs", False, "absolute"),
)
CHAIN = PATTERN * (OPERATORS // len(PATTERN))
OPERAND = 0.5


class DisagreementError(GpunetError):
    """The net does not compute what the calls do."""


def measure(effort: Effort) -> list[Row]:
    """Microseconds an operator by which the net exceeds the calls; and the whole beside PyTorch's calls."""
    workspace, net = _net()
    arrays, calls = _calls(np, [np.full(SIZE, OPERAND, np.float32) for _ in range(OPERATORS + 2)], "")
    contenders = {"gpunet": net, "numpy": calls}
    if counterpart.INSTALLED:
        torch = counterpart.torch()
        _, contenders["torch"] = _calls(
            torch, [torch.full((SIZE,), OPERAND) for _ in range(OPERATORS + 2)], "out="
        )
    times = compare(contenders, effort).seconds
    if not np.array_equal(workspace.fetch(f"x{OPERATORS}"), arrays[OPERATORS]):
        raise DisagreementError("the net gives other numbers than NumPy's calls, wanted the same")
    nets, numpy, factor = times["gpunet"].values, times["numpy"].values, 1e6 / OPERATORS
    rows = [
        Row(
            FIGURE,
            f"1 of {OPERATORS} operators, over NumPy's call",
            unit="µs",
            own=Samples.of([a - b for a, b in zip(nets, numpy, strict=True)], factor),
            other=Samples.of(numpy, factor),
            counterpart="NumPy's call itself",
            bar=Bar(1.5, of_ratio=False),
        )
    ]
    if counterpart.INSTALLED:
        torches = times["torch"].values
        rows.append(
            Row(
                FIGURE,
                f"1 of {OPERATORS} operators",
                unit="µs",
                own=Samples.of(nets, factor),
                other=Samples.of(torches, factor),
                counterpart="torch's call",
                ratios=Samples.of([a / b for a, b in zip(nets, torches, strict=True)]),
                bar=Bar(1 / 3),
            )
        )
    return rows


def _net() -> tuple[gpunet.Workspace, Callable[[], object]]:
    net = gpunet.Net("tiny")
    for number, (type_, binary, _) in enumerate(CHAIN):
        net.add(type_, [f"x{number}", *(["operand"] if binary else [])], [f"x{number + 1}"])
    workspace = gpunet.Workspace("cpu")
    for name in ("x0", "operand"):
        workspace.feed(name, np.full(SIZE, OPERAND, np.float32))
    created = workspace.create(net)
    return workspace, lambda: workspace.run(created)


def _calls(module: object, arrays: list[Any], keyword: str) -> tuple[list[Any], Callable[[], object]]:
    """The arrays, and a function of the bare calls on them, with nothing to look up, as written by hand."""
    functions = dict.fromkeys(function for *_, function in CHAIN)
    lines = [
        f"    {function}(x{number}, {'operand, ' if binary else ''}{keyword}x{number + 1})"
        for number, (_, binary, function) in enumerate(CHAIN)
    ]
    names = [*functions, *(f"x{number}" for number in range(OPERATORS + 1)), "operand"]
    scope: dict[str, Callable[..., object]] = {}
    exec("\n".join([f"def calls({', '.join(names)}):", *lines]), scope)
    arguments = [*(getattr(module, function) for function in functions), *arrays]
    return arrays, lambda: scope["calls"](*arguments)

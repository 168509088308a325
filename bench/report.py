"""Tables of results: for terminals, and in Markdown for documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from gpunet.errors import GpunetError

from .rows import Row, Samples

HEADINGS = (
    "figure",
    "case",
    "gpunet",
    "least to most",
    "counterpart",
    "",
    "ratio",
    "at best",
    "wanted",
    "met",
)
#: What :func:`write_markdown` writes between.
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


STYLES = {"yes": "green", "no": "red", "unsure": "yellow"}


class ReportError(GpunetError):
    """Results have no place to go."""


def table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    found = Table(*HEADINGS)
    for number, heading in enumerate(HEADINGS):
        if heading in ("gpunet", "", "ratio", "at best", "wanted"):
            found.columns[number].justify = "right"
    previous = ""
    for row in rows:
        if previous and row.figure != previous:
            found.add_section()
        found.add_row(*_cells(row), style=STYLES.get(row.verdict))
        previous = row.figure
    return found


def verdict(rows: Sequence[Row]) -> str:
    """How many bars are met, in words."""
    found = Counter(row.verdict for row in rows if row.bar is not None)
    words = [f"{found['yes']} of {found.total() - found['-']} bars met"]
    if found["unsure"]:
        words.append(f"{found['unsure']} unsure")
    if found["-"]:
        words.append(f"{found['-']} without a counterpart to compare with")
    return ", ".join(words)


def write_json(path: Path, machine: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Writes everything to a file; `-` is standard output."""
    text = json.dumps({"machine": dict(machine), "rows": [row.as_dict() for row in rows]}, indent=1)
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def write_markdown(path: Path, machine: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Replaces what stands between :data:`BEGIN` and :data:`END` in a document.

    Raises :class:`ReportError` if it has no such place.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"{path} has no place for results, wanted a line {BEGIN} and after it a line {END}")
    lines = [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    lines += ["", verdict(rows) + "."]
    path.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")


def _cells(row: Row) -> tuple[str, ...]:
    wanted = ""
    if row.bar is not None:
        wanted = f"≤ {row.bar.limit:g}" + (" ×" if row.bar.of_ratio else f" {row.unit}")
    return (
        row.figure,
        row.case,
        _median(row.own, row.unit),
        _range(row.own),
        row.counterpart,
        _median(row.other, row.unit),
        _median(row.ratios, "×"),
        "" if row.best_ratio is None else f"{_number(row.best_ratio)} ×",
        wanted,
        row.verdict,
    )


def _median(samples: Samples | None, unit: str) -> str:
    return "" if samples is None else f"{_number(samples.median)} {unit}"


def _range(samples: Samples | None) -> str:
    if samples is None or len(samples.values) == 1:
        return ""
    return f"{_number(samples.low)} to {_number(samples.high)}"


def _number(value: float) -> str:
    """Three figures that count."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"

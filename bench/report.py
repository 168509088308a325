"""Tables of results: for terminals, and in Markdown for documents."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gpunet.errors import GpunetError

from .figures import FIGURES
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
    text = _json({"machine": dict(machine), "rows": [row.as_dict() for row in rows]})
    if str(path) == "-":
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def _json(found: Mapping[str, Any]) -> str:
    """Indented, but for lists of numbers."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\[[-+.\deE,\s]*\]", lambda match: " ".join(match[0].split()), text)


def save(folder: Path, machine: Mapping[str, str], rows: Sequence[Row], names: Sequence[str]) -> Path:
    """Puts the rows of the figures ``names`` in the file of this machine, in place of older ones.

    A machine is its processor and its number of cores; what else describes it is that of the last time, but
    for the load, which stands for each figure.

    Returns:
        The file.

    Raises:
        ReportError: the file is there and is none of these.
    """
    words = re.findall(r"[a-z0-9]+", f"{machine['cpu']} {machine['cores'].split()[0]} cores".lower())
    path = folder / f"{'-'.join(word for word in words if word not in ('r', 'tm'))}.json"
    loads, before = {}, []
    if path.exists():
        saved = read(path)
        loads = saved.loads
        before = [row for row in saved.rows if row.figure not in names]
    measured = [row.figure for row in rows]
    loads = {**loads, **{name: machine["load"] for name in names if name in measured}}
    folder.mkdir(parents=True, exist_ok=True)
    described = {name: value for name, value in machine.items() if name != "load"}
    kept = [row.as_dict() for row in (*before, *rows)]
    path.write_text(_json({"machine": described, "loads": loads, "rows": kept}) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True)
class Saved:
    """What a file of results holds: the machine, its load while each figure was taken, and all rows."""

    machine: dict[str, str]
    loads: dict[str, str]
    rows: list[Row]

    @property
    def described(self) -> dict[str, str]:
        """The machine with its load, for a document."""
        figures: dict[str, list[str]] = {}
        for name, load in self.loads.items():
            figures.setdefault(load, []).append(name)
        text = "; ".join(
            load if len(figures) == 1 else f"{', '.join(names)}: {load}" for load, names in figures.items()
        )
        return {**self.machine, "load": text}


def read(path: Path) -> Saved:
    """Reads what :func:`save` has written; raises :class:`ReportError` for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        order = {name: number for number, name in enumerate(FIGURES)}
        rows = sorted(map(Row.from_dict, found["rows"]), key=lambda row: order.get(row.figure, len(order)))
        return Saved(found["machine"], found["loads"], rows)
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{path} holds no results ({type(error).__name__}: {error}), wanted what --save has written"
        ) from None


def write_markdown(path: Path, machine: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Replaces what stands between :data:`BEGIN` and :data:`END` in a document.

    Raises :class:`ReportError` if it has no such place.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"{path} has no place for results, wanted a line {BEGIN} and after it a line {END}")
    path.write_text(before + "\n".join([BEGIN, *lines_of(machine, rows), END]) + after, encoding="utf-8")


def lines_of(machine: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    """The machine and the table in Markdown."""
    lines = [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return [*lines, "", verdict(rows) + "."]


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

"""Results of benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], factor: float = 1.0) -> Samples:
        """The values times a factor, for another unit."""
        return cls(tuple(v * factor for v in values))

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    def summary(self) -> dict[str, Any]:
        """Median, least, greatest and number of values, and the values themselves to six figures."""
        return {
            "median": self.median,
            "min": self.low,
            "max": self.high,
            "repeats": len(self.values),
            "values": [float(f"{value:.6g}") for value in self.values],
        }


@dataclass(frozen=True)
class Bar:
    """What a figure must not exceed: its ratio to the counterpart, or its own value in its unit."""

    limit: float
    of_ratio: bool = True


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        figure: the figure that it belongs to.
        case: what was measured.
        unit: of ``own`` and ``other``; empty for rows that only sum up ratios.
        own: gpunet's measurements.
        other: those of the counterpart.
        counterpart: what the counterpart is, or why there is none.
        ratios: gpunet's value over the counterpart's, one for each round in which both were measured.
        bar: what is wanted; ``None`` for rows that only inform.
    """

    figure: str
    case: str
    unit: str = "ms"
    own: Samples | None = None
    other: Samples | None = None
    counterpart: str = ""
    ratios: Samples | None = None
    bar: Bar | None = None

    @property
    def best_ratio(self) -> float | None:
        """The least of gpunet's values over the least of the counterpart's, where there is a ratio."""
        if self.ratios is None or self.own is None or self.other is None:
            return None
        return self.own.low / self.other.low

    @property
    def verdict(self) -> str:
        """Whether the bar is met.

        ``yes`` if by the median and at best, ``no`` if by neither, ``unsure`` if by one: the machine was
        too busy to tell. ``-`` where there is nothing to compare with, and nothing without a bar.
        """
        if self.bar is None:
            return ""
        samples = self.ratios if self.bar.of_ratio else self.own
        if samples is None:
            return "-"
        best = self.best_ratio if self.bar.of_ratio else samples.low
        met = {value <= self.bar.limit for value in (samples.median, best) if value is not None}
        return "unsure" if len(met) == 2 else "yes" if met == {True} else "no"

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        sides = {"own": self.own, "other": self.other, "ratio": self.ratios}
        return {
            "figure": self.figure,
            "case": self.case,
            "unit": self.unit,
            **{name: samples and samples.summary() for name, samples in sides.items()},
            "counterpart": self.counterpart,
            "bar": self.bar and {"limit": self.bar.limit, "of": "ratio" if self.bar.of_ratio else "value"},
            "best_ratio": self.best_ratio,
            "met": self.verdict,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Row:
        """The row that :meth:`as_dict` has described."""
        samples = {
            field: Samples(tuple(found[side]["values"])) if found[side] else None
            for field, side in (("own", "own"), ("other", "other"), ("ratios", "ratio"))
        }
        bar = found["bar"] and Bar(found["bar"]["limit"], found["bar"]["of"] == "ratio")
        texts = {name: found[name] for name in ("figure", "case", "unit", "counterpart")}
        return cls(**texts, **samples, bar=bar)


def mean_ratio(figure: str, case: str, rows: Sequence[Row], bar: Bar) -> Row:
    """A row for the geometric mean of the ratios of rows, in which twice as fast and twice as slow cancel.

    Without ratios the row says why, as the first of the rows does.
    """
    ratios = [row.ratios.median for row in rows if row.ratios is not None]
    mean = Samples((statistics.geometric_mean(ratios),)) if ratios else None
    counterpart = rows[0].counterpart if rows else ""
    return Row(figure, case, unit="", counterpart=counterpart, ratios=mean, bar=bar)

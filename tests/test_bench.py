"""The benchmark suite: what it lists, how it judges, and one small figure from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet.bench import figures, memory, report, timing
from gpunet.bench.__main__ import main
from gpunet.bench.rows import Bar, Row, Samples, mean_ratio
from gpunet.errors import GpunetError


def test_list_names_every_figure() -> None:
    done = CliRunner().invoke(main, ["--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == list(figures.FIGURES)


def test_a_figure_from_end_to_end(tmp_path: Path) -> None:
    results, document = tmp_path / "results.json", tmp_path / "document.md"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    arguments = ["overhead", "--quick", "--json", str(results), "--markdown", str(document)]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(results.read_text())
    assert found["machine"]["numpy"].startswith(np.__version__)
    row = found["rows"][0]
    assert row["figure"] == "overhead"
    assert row["own"]["repeats"] >= timing.QUICK.rounds
    assert row["other"]["median"] > 0
    assert row["bar"] == {"limit": 1.5, "of": "value"}
    assert row["met"] in ("yes", "no", "unsure")
    text = document.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n- cpu: ")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert f"| {row['case']} |" in text


def test_json_alone_on_standard_output() -> None:
    done = CliRunner().invoke(main, ["overhead", "--quick", "--json", "-"], catch_exceptions=False)
    assert {row["figure"] for row in json.loads(done.stdout)["rows"]} == {"overhead"}
    assert "bars met" in done.stderr


def test_a_figure_that_fails_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(figure: figures.Figure, effort: timing.Effort) -> list[Row]:
        raise GpunetError("no luck")

    monkeypatch.setattr(figures.Figure, "measure", fail)
    done = CliRunner().invoke(main, ["overhead"])
    assert done.exit_code == 1
    assert "overhead could not be measured: no luck" in done.output


def test_results_of_a_machine_are_kept_beside_those_of_other_figures(tmp_path: Path) -> None:
    machine = {"cpu": "Some(R) CPU @ 2 GHz", "cores": "2 usable of 4", "load": "0.1"}
    row = Row("overhead", "a", own=Samples((1.0, 2.0)), other=Samples((4.0,)), ratios=Samples((0.25, 0.5)))
    path = report.save(tmp_path / "results", machine, [row], ["overhead"])
    assert path.name == "some-cpu-2-ghz-2-cores.json"
    barred = Row("training", "b", own=Samples((3.0,)), bar=Bar(4, of_ratio=False))
    assert report.save(tmp_path / "results", {**machine, "load": "0.2"}, [barred], ["training"]) == path
    found = report.read(path)
    assert found.rows == [barred, row], "in the order of the figures"
    assert found.described["load"] == "overhead: 0.1; training: 0.2"
    newer = Row("overhead", "c", own=Samples((1.0,)))
    report.save(tmp_path / "results", {**machine, "load": "0.2"}, [newer], ["overhead"])
    found = report.read(path)
    assert found.rows == [barred, newer]
    assert found.described["load"] == "0.2"
    path.write_text("{}")
    with pytest.raises(report.ReportError, match=r"2-cores\.json holds no results .*wanted what --save"):
        report.save(tmp_path / "results", machine, [row], ["overhead"])


def test_the_document_shows_what_the_results_hold() -> None:
    root = Path(__file__).parents[1]
    text = (root / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = text.partition(report.BEGIN)[2].partition(report.END)[0].strip().splitlines()
    files = sorted((root / "bench" / "results").glob("*.json"))
    found = [report.read(path) for path in files]
    assert shown in [report.lines_of(saved.described, saved.rows) for saved in found]


def test_a_document_without_a_place_for_results_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("text\n")
    with pytest.raises(report.ReportError, match="no place for results"):
        report.write_markdown(document, {}, [])
    assert document.read_text() == "text\n"


@pytest.mark.parametrize(
    ("own", "other", "ratios", "bar", "verdict"),
    [
        ([4, 2, 3], [4, 4, 4], [1.0, 0.5, 0.75], Bar(0.8), "yes"),
        ([4, 2, 3], [2, 2, 2], [2.0, 1.0, 1.5], Bar(0.8), "no"),
        ([4, 2, 3], [4, 4, 3], [1.0, 0.5, 1.0], Bar(0.8), "unsure"),
        ([4, 2, 3], None, None, Bar(0.8), "-"),
        ([4, 2, 3], None, None, Bar(3, of_ratio=False), "yes"),
        ([4, 2, 3], None, None, Bar(2.5, of_ratio=False), "unsure"),
        ([4, 2, 3], None, None, None, ""),
    ],
)
def test_verdict(
    own: list[float], other: list[float] | None, ratios: list[float] | None, bar: Bar | None, verdict: str
) -> None:
    row = Row(
        "f", "c", "ms", Samples.of(own), other and Samples.of(other), "", ratios and Samples.of(ratios), bar
    )
    assert row.verdict == verdict


def test_mean_of_ratios_is_geometric() -> None:
    rows = [Row("f", "c", ratios=Samples((ratio,))) for ratio in (0.5, 2.0)]
    mean = mean_ratio("f", "mean", rows, Bar(1.1))
    assert mean.ratios is not None
    assert mean.ratios.median == pytest.approx(1.0)
    assert mean.verdict == "yes"
    assert mean_ratio("f", "mean", [Row("f", "c", counterpart="none")], Bar(1.0)).verdict == "-"


def test_contenders_take_turns() -> None:
    effort = timing.Effort(
        rounds=4,
        most_rounds=4,
        scatter=0.0,
        settle=0.0,
        times=1,
        seconds=0.0,
        budget=60.0,
        patience=0.0,
        quick=True,
    )
    calls: list[str] = []
    result = timing.compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, effort)
    # Two calls and a timed one to begin with; then one untimed and one timed in each round, in turns.
    assert "".join(calls) == "aaabbb" + "aabb" + "bbaa" + "aabb" + "bbaa"
    assert [len(result.seconds[name].values) for name in "ab"] == [4, 4]
    pairs = zip(result.seconds["a"].values, result.seconds["b"].values, strict=True)
    assert result.ratios["b"].values == tuple(a / b for a, b in pairs)


def test_shared_memory_counts_once() -> None:
    workspace = gpunet.Workspace("cpu")
    workspace.feed("x", np.zeros((4, 6), np.float32))
    workspace.feed("y", np.zeros(5, np.int64))
    net = gpunet.Net("n")
    net.add("Reshape", ["x"], ["x", "old_shape"], shape=[24])
    workspace.run_once(net)
    known = sum(workspace.fetch(name).nbytes for name in ("x", "y", "old_shape"))
    workspace.replace("view", workspace.value("x")[:3])
    assert memory.tensor_bytes(workspace) == known

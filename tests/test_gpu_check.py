"""The check on a GPU, on the simulated device: all sections to their end, and what breaks one of them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpunet import gradient_check
from gpunet.bench import gpu_check, gpu_correctness, gpu_speed
from gpunet.bench.gpu_records import Place, Section
from gpunet.devices import gpu_count
from tests.sim_kernels import needs_compiler

#: Sections that go wrong in every way, in processes of their own.
SCRIPT = """
import os, subprocess, time
from gpunet.bench import gpu_check
from gpunet.bench.gpu_records import Record, Section

def breaks(place):
    yield Record("before", True)
    raise ValueError("no luck")

def crashes(place):
    for number in range(place.skip, 4):
        place.begin(f"case {number}")
        if number == 1:
            os._exit(9)
        if number == 2:
            time.sleep(60)
        yield Record(f"case {number}", True)

def dies(place):
    yield Record("before", True)
    print("an ugly end", flush=True)
    os._exit(7)

def measures(place):
    yield Record("speed", value=2.0, unit="ms")

def leaves(place):
    left = subprocess.Popen(["sleep", "100"])
    yield Record("left behind", value=left.pid)
    time.sleep(100)

gpu_check.SECTIONS = [Section(f.__name__, "", f, 30) for f in (breaks, crashes, dies, measures, leaves)]
gpu_check.main()
"""


def invoke(*arguments: str, code: int) -> str:
    done = CliRunner().invoke(gpu_check.main, list(arguments))
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.output


def sections(path: Path) -> dict[str, Any]:
    return {section["name"]: section for section in json.loads(path.read_text())["sections"]}


@needs_compiler
@pytest.mark.slow
def test_everything_on_the_simulated_device(tmp_path: Path) -> None:
    shown = invoke("--device", "sim:0", "--quick", "--json", str(tmp_path / "out.json"), code=0)
    assert "nothing failed" in shown
    found = sections(tmp_path / "out.json")
    assert list(found) == [section.name for section in gpu_check.SECTIONS]
    for section in found.values():
        assert section["status"] in ("ok", "measured"), section
        assert section["records"], section["name"]
    operators = found["operators"]["records"]
    assert sum(record.get("ok", False) for record in operators) > 20
    assert any("graphs were launched [4] times" in r["detail"] for r in found["graphs"]["records"])
    assert {"float32", "float16"} <= {r["case"].split(", ")[2] for r in found["training"]["records"]}


def test_every_operator_type_has_its_turn() -> None:
    rows = gpu_correctness.cases()
    types = {row.type for row in rows}
    by_turns = gpu_correctness.in_turns(rows)
    assert sorted(map(id, by_turns)) == sorted(map(id, rows))
    first = [row.type for row in by_turns[: len(types)]]
    assert set(first) == types
    assert [t for t in first if "Conv" in t] == first[-sum("Conv" in t for t in types) :]
    few = Counter(row.type for row in gpu_correctness.in_turns(rows, 4))
    assert set(few) == types
    assert max(few.values()) == 4


def test_limits_do_not_cut_the_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, float]] = []

    def check(section: Section, device: str, quick: bool, seconds: float, patience: float) -> Any:
        given.append((section.seconds, seconds))
        return gpu_check.Result(section.name)

    monkeypatch.setattr(gpu_check, "check_section", check)
    monkeypatch.setattr(gpu_check, "backend", lambda device: None)
    invoke("--device", "sim:0", code=0)
    assert len(given) == len(gpu_check.SECTIONS)
    assert all(limit == gpu_check.PATIENCE * seconds for seconds, limit in given)
    given.clear()
    invoke("--device", "cuda:0", code=0)
    assert all(limit <= seconds for seconds, limit in given)


@needs_compiler
def test_one_section(tmp_path: Path) -> None:
    arguments = ["--device", "sim:0", "--quick", "--only", "random", "--json", str(tmp_path / "out.json")]
    shown = invoke(*arguments, code=0)
    assert "0 of 1000 elements differ" in shown
    found = sections(tmp_path / "out.json")
    assert list(found) == ["device", "random"]
    assert {record["ok"] for record in found["random"]["records"]} == {True}


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert "Error: cuda:0 cannot be used: " in invoke("--quick", code=1)


@pytest.mark.parametrize(
    ("device", "message"),
    [("cpu", "is what others are compared with"), ("tpu:1", "unknown device 'tpu:1'")],
)
def test_devices_that_are_refused(device: str, message: str) -> None:
    assert message in invoke("--device", device, code=1)


def test_sections_that_break_cost_only_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(gpu_check, "CHILD", (sys.executable, str(script)))
    found = {
        name: gpu_check.check_section(Section(name, "", lambda place: iter(()), 30, 5), "sim:0", True, 30)
        for name in ("breaks", "crashes", "dies", "measures")
    }
    assert [r.case for r in found["breaks"].records] == ["before"]
    assert found["breaks"].message == "ValueError: no luck"
    assert 'raise ValueError("no luck")' in found["breaks"].traceback
    assert [(r.case, r.ok, r.detail) for r in found["crashes"].records] == [
        ("case 0", True, ""),
        ("case 1", False, "the process ended with status 9 in this case"),
        ("case 2", False, "the process made no progress for 5 s and was ended in this case"),
        ("case 3", True, ""),
    ]
    assert found["crashes"].message == ""
    assert found["dies"].message == "the process ended with status 7: an ugly end"
    assert [r.status for r in found.values()] == ["failed", "failed", "failed", "measured"]
    assert found["measures"].as_dict()["records"] == [{"case": "speed", "value": 2.0, "unit": "ms"}]
    assert gpu_check.table(list(found.values())).row_count == 13


def test_a_section_ends_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(gpu_check, "CHILD", (sys.executable, str(script)))
    monkeypatch.setattr(gpu_check, "GRACE", 0.0)
    found = gpu_check.check_section(Section("leaves", "", lambda place: iter(()), 4), "sim:0", True, 4)
    assert found.message == "the process ran out of time"
    (record,) = found.records
    # Whoever takes over an orphan may leave it as a zombie.
    status = Path(f"/proc/{record.value}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


@needs_compiler
def test_what_gpunet_does_not_expect_costs_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = gpu_correctness.cases()[::300]
    monkeypatch.setattr(gpu_correctness, "cases", lambda: rows)
    begun: list[str] = []

    def place(skip: int = 0) -> Place:
        begun.clear()
        return Place("sim:0", False, float("inf"), skip, begun.append)

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("of a library")

    monkeypatch.setattr(gradient_check, "compare_devices", fails)
    found = [record for record in gpu_correctness.operators(place()) if record.ok is not None]
    assert len(found) == len(begun) >= 5
    for record in found:
        assert record.ok is False
        assert record.detail.startswith("RuntimeError: of a library (")
        assert "test_gpu_check.py" in record.detail
    every = list(begun)
    assert len(list(gpu_correctness.operators(place(skip=3)))) == len(found) - 3
    assert begun == every[3:]

    monkeypatch.setattr(gpu_correctness, "losses", fails)
    monkeypatch.setattr(gpu_speed, "model", fails)
    monkeypatch.setattr(gpu_speed.gemm, "matmul", fails)
    monkeypatch.setattr(gpu_speed, "_tiny_net", fails)
    for section in (gpu_speed.steps, gpu_speed.products, gpu_speed.launches):
        records = list(section(place()))
        assert [r.case for r in records if r.ok is False] == begun != []
        assert not list(section(place(skip=len(begun))))[1:], "what was begun before is not run again"

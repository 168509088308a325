"""One command that checks and measures everything on a GPU, offline: `python -m bench.gpu_check`.

Each section runs in a process of its own, with a limit of time: a kernel that hangs or breaks the device
costs that section alone. The operator tables go on behind the row that did it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gpunet
from gpunet.backends import backend
from gpunet.devices import CPU, parse_device
from gpunet.errors import GpunetError

from . import gpu_correctness, gpu_speed, machine
from .gpu_records import Place, Record, Section

#: In order, most telling first: what time is left decides over the last ones.
SECTIONS: Final = (
    Section("device", "what is there", gpu_correctness.device, 30),
    Section("compilation", "every kernel compiles and loads", gpu_correctness.compilation, 120),
    Section("operators", "the operator tables against the CPU", gpu_correctness.operators, 90, 20),
    Section("random", "random bits against the CPU's", gpu_correctness.random_bits, 20),
    Section("graphs", "capture and replay", gpu_correctness.graphs, 25),
    Section("training", "losses of LeNet and ResNet-20 against the CPU's", gpu_correctness.training, 60),
    Section("launches", "cost of a launch, and of an operator of a net", gpu_speed.launches, 20),
    Section("copies", "bandwidth", gpu_speed.copies, 20),
    Section("steps", "training steps", gpu_speed.steps, 50),
    Section("products", "matrix products by route", gpu_speed.products, 30),
    Section("convolutions", "default engine and DIRECT", gpu_speed.convolutions, 40),
)
#: Seconds in all.
TOTAL: Final = 340.0
#: Seconds that a process may go on after its section's time: one long case, and the end of the process.
GRACE: Final = 15.0
#: How many times as long the limits are on the simulated device: there they only end what hangs.
PATIENCE: Final = 10
#: Seconds between looks at a process.
POLL: Final = 0.25
#: What runs a section.
CHILD: Final = (sys.executable, "-m", "gpunet.bench.gpu_check")
#: Exit status of a process that has lost its device.
LOST: Final = 3
WIDTH: Final = 170


@dataclass
class Result:
    """What a section found; of one that broke off also why, and the traceback."""

    name: str
    seconds: float = 0.0
    message: str = ""
    traceback: str = ""
    records: list[Record] = field(default_factory=list)

    @property
    def failed(self) -> list[Record]:
        """The findings that are not as they should be."""
        return [record for record in self.records if record.ok is False]

    @property
    def status(self) -> str:
        """``failed``, ``ok``, or ``measured`` where nothing could be wrong."""
        if self.message or self.failed:
            return "failed"
        return "ok" if any(record.ok for record in self.records) else "measured"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"name": self.name, "status": self.status, "seconds": round(self.seconds, 1)}
        error = {"message": self.message, "traceback": self.traceback} if self.message else {}
        return {**found, **error, "records": [record.as_dict() for record in self.records]}


# ---- in the process of a section ----


def run_section(name: str, place: Place, out: Path) -> int:
    """Runs a section and writes a line of JSON for each event; returns the exit status."""
    (section,) = (s for s in SECTIONS if s.name == name)
    with out.open("a", encoding="utf-8") as file:

        def write(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        told = Place(
            place.device,
            place.quick,
            place.deadline,
            place.skip,
            lambda case: write({"begin": case}),
        )
        try:
            for record in section.run(told):
                write({"record": record.as_dict()})
                if record.ok is False and not _alive(told):
                    return LOST
        except GpunetError as error:
            write({"broken": str(error), "traceback": traceback.format_exc()})
        except Exception as error:
            write({"broken": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        write({"done": True})
    return 0


def _alive(place: Place) -> bool:
    """Whether the device still works: after an illegal access nothing does in a process."""
    try:
        place.backend.stream.synchronize()
        place.put(np.zeros(1, np.float32)).numpy()
    except Exception:
        return False
    return True


# ---- in the process of the command ----


def check_section(
    section: Section, device: str, quick: bool, seconds: float, patience: float = 1.0
) -> Result:
    """Runs a section in processes of its own. ``patience`` is how many times as long a case may take."""
    result = Result(section.name)
    start = time.perf_counter()
    skip = 0
    while True:
        left = seconds - (time.perf_counter() - start)
        events, ended = _process(section, device, quick, left, skip, section.stall * patience)
        result.records += [Record(**e["record"]) for e in events if "record" in e]
        broken = next((e for e in events if "broken" in e), None)
        if broken is not None:
            result.message, result.traceback = broken["broken"], broken["traceback"]
        begun = [e["begin"] for e in events if "begin" in e]
        skip += len(begun)
        if any("done" in e for e in events):
            break
        unfinished = bool(begun) and "begin" in events[-1]
        if unfinished:
            result.records.append(Record(begun[-1], False, detail=f"the process {ended} in this case"))
        if not begun or seconds - (time.perf_counter() - start) < 5:
            if not unfinished:
                result.message = f"the process {ended}"
            break
    result.seconds = time.perf_counter() - start
    return result


def _process(
    section: Section, device: str, quick: bool, seconds: float, skip: int, stall: float
) -> tuple[list[dict[str, Any]], str]:
    """The events that a process wrote, and how it ended."""
    root = str(Path(gpunet.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "events", Path(folder) / "said"
        out.touch()
        command = [*CHILD, "--device", device, "--section", section.name, "--events", str(out)]
        command += ["--seconds", str(seconds), "--skip", str(skip), *["--quick"] * quick]
        with said.open("wb") as file:
            child = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a group, which is ended with the processes that it has started
            )
        try:
            ended = _wait(child, out, seconds + GRACE, stall)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        events = _events(out)
        words = said.read_text(encoding="utf-8", errors="replace").strip()[-1000:]
        return events, f"{ended}: {words}" if words and ended.startswith("ended") else ended


def _wait(child: subprocess.Popen[bytes], out: Path, seconds: float, stall: float) -> str:
    """Waits for a process, and ends it when its time is over or a case hangs; returns how it ended."""
    end = time.perf_counter() + seconds
    size, since = 0, time.perf_counter()
    while True:
        try:
            status = child.wait(POLL)
        except subprocess.TimeoutExpired:
            now = time.perf_counter()
            if out.stat().st_size != size:
                size, since = out.stat().st_size, now
            events = _events(out)
            hangs = bool(events) and "begin" in events[-1] and now - since > stall
            if now < end and not hangs:
                continue
            return f"made no progress for {stall:.0f} s and was ended" if hangs else "ran out of time"
        return "lost the device" if status == LOST else f"ended with status {status}"


def _events(out: Path) -> list[dict[str, Any]]:
    found = []
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the process was ended while it wrote, or is writing
            break
    return found


def table(results: list[Result]) -> Table:
    """All sections; of the findings those that failed or were measured."""
    found = Table("section", "case", "result", "value", "")
    found.columns[3].justify = "right"
    for result in results:
        good = sum(1 for r in result.records if r.ok)
        words = (
            f"{good} ok, {len(result.failed)} failed, {len(result.records) - good - len(result.failed)} other"
        )
        style = {"failed": "red", "ok": "green"}.get(result.status)
        found.add_section()
        found.add_row(result.name, f"{result.seconds:.0f} s", result.status, "", words, style=style)
        if result.message:
            found.add_row("", "", "", "", escape(result.message), style="red")
        for record in result.records:
            shown = record.ok is False or (result.name != "operators" and result.name != "compilation")
            if shown or (record.ok is None and record.detail and "stays on" not in record.detail):
                value = "" if record.value is None else f"{record.value:.4g} {record.unit}"
                status = {True: "ok", False: "failed", None: ""}[record.ok]
                detail = " ".join(record.detail.split())
                cells = (
                    "",
                    record.case,
                    status,
                    value,
                    detail if len(detail) < 300 else f"{detail[:300]} ...",
                )
                found.add_row(*map(escape, cells), style="red" if record.ok is False else None)
    return found


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Checks a GPU against the CPU and measures it, without a network, in less than 6 minutes; on the "
    "simulated device to the end, however long it takes. The exit status is 1 if anything failed.",
)
@click.option("--device", "name", default="cuda:0", show_default=True, help="cuda:N, or sim:N for a trial.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all to a file."
)
@click.option("--quick", is_flag=True, help="A small part of each section.")
@click.option(
    "--only", multiple=True, type=click.Choice([s.name for s in SECTIONS]), help="These sections alone."
)
@click.option("--section", hidden=True)
@click.option("--events", hidden=True, type=click.Path(path_type=Path))
@click.option("--seconds", hidden=True, type=float, default=TOTAL)
@click.option("--skip", hidden=True, type=int, default=0)
def main(
    name: str,
    json_path: Path | None,
    quick: bool,
    only: tuple[str, ...],
    section: str | None,
    events: Path | None,
    seconds: float,
    skip: int,
) -> None:
    """Runs the sections one after another."""
    if section is not None and events is not None:
        place = Place(name, quick, time.perf_counter() + seconds, skip)
        sys.exit(run_section(section, place, events))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    start = time.perf_counter()
    described = {**machine.describe(), "device": name, "quick": str(quick).lower()}
    results: list[Result] = []
    patience = 1
    try:
        if parse_device(name) == CPU:
            raise click.ClickException(
                f"device {name!r} is what others are compared with, wanted cuda:N or sim:N"
            )
        if parse_device(name).kind == "sim":
            backend(parse_device(name))
            patience = PATIENCE
    except GpunetError as error:
        raise click.ClickException(str(error)) from None
    for one in SECTIONS:
        if only and one.name not in only and one.name != "device":
            continue
        left = seconds * patience - (time.perf_counter() - start)
        if left < 5:
            results.append(Result(one.name, records=[Record("section", detail="not reached in time")]))
            continue
        with console.status(f"{one.name}: {one.doc}"):
            results.append(check_section(one, name, quick, min(one.seconds * patience, left), patience))
        console.print(f"{one.name:12s} {results[-1].status:8s} {results[-1].seconds:4.0f} s  {one.doc}")
        if json_path is not None:
            write_json(json_path, described, results)
        if one.name == "device" and results[-1].message:
            raise click.ClickException(f"{name} cannot be used: {results[-1].message}")
    console.print(table(results))
    failed = [result.name for result in results if result.status == "failed"]
    verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
    console.print(
        f"{time.perf_counter() - start:.0f} s in all; {verdict}", style="red" if failed else "green"
    )
    sys.exit(1 if failed else 0)


def write_json(path: Path, described: dict[str, str], results: list[Result]) -> None:
    """Writes everything that is known so far."""
    text = json.dumps({"machine": described, "sections": [result.as_dict() for result in results]}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(prog_name=f"python -m {__package__}.gpu_check")

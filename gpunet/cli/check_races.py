"""``gpunet check-races``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpunet.cli import Command
from gpunet.cli.nets import count, created, net_options

if TYPE_CHECKING:
    from gpunet.program import Program
    from gpunet.races import Race
    from gpunet.workspace import Workspace


@click.command(cls=Command)
@net_options
@click.option(
    "--recorded", is_flag=True, help="Run NET on the simulated device, and check what its streams did."
)
@click.option(
    "--runs", type=click.IntRange(min=1), default=3, show_default=True, help="Runs with --recorded."
)
def command(net: str, recorded: bool, runs: int, device: str, detect_nan: bool, **options: Any) -> None:
    """Prove that no schedule of NET lets two operators touch the same bytes in no fixed order.

    NET is the folder of a saved model, a file with a net, or zoo:MODEL. The exit status is 1, and each race
    is listed, if there is one.

    With --recorded it is not the plan that is checked but runs: each launch and copy with the bytes that it
    reads and writes, in the order that streams and events guarantee. GPUNET_SIM_SEED picks another order of
    the streams.
    """
    from gpunet.records import check_races

    if recorded:
        device = "sim:0" if device == "auto" else device
    _, workspace, program = created(net, device=device, detect_nan=detect_nan, **options)
    if recorded:
        if detect_nan:
            # In a run of its own: what it copies to the host to look at would order the rest.
            workspace.run(program.name)
            program.observers = ()
        _check_recorded(workspace, program, runs)
        return
    program.prepare()
    races = check_races(program)
    schedules = [s.compiled.schedule for s in program.segments() if s.compiled is not None]
    steps = sum(len(schedule.items) for schedule in schedules)
    lanes = len({lane for schedule in schedules for lane in schedule.lanes})
    waits = sum(len(item.waits) for schedule in schedules for item in schedule.items)
    _conclude(f"{count(steps, 'step')} in {count(lanes, 'lane')}, {count(waits, 'wait')}", races)


def _check_recorded(workspace: Workspace, program: Program, runs: int) -> None:
    from gpunet.races import find_races
    from gpunet.records import record_run

    records = record_run(workspace, program.name, runs)
    work = [record for record in records if record.accesses]
    lanes = len({record.lane for record in work})
    waits = sum(record.label == "wait" for record in records)
    summary = (
        f"{count(len(work), 'piece')} of work in {count(runs, 'run')} on "
        f"{count(lanes, 'stream')}, {count(waits, 'wait')}"
    )
    _conclude(summary, find_races(records))


def _conclude(summary: str, races: Sequence[Race]) -> None:
    for race in races:
        click.echo(str(race))
    if races:
        click.secho(f"{summary}: {count(len(races), 'race')}", fg="red")
        click.get_current_context().exit(1)
    click.echo(f"{summary}: no two touch the same bytes in no fixed order")

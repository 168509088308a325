"""``gpunet check-races``."""

from __future__ import annotations

from typing import Any

import click

from gpunet.cli import Command
from gpunet.cli.nets import count, created, net_options


@click.command(cls=Command)
@net_options
def command(net: str, **options: Any) -> None:
    """Prove that no schedule of NET lets two operators touch the same bytes in no fixed order.

    NET is the folder of a saved model, a file with a net, or zoo:MODEL. The exit status is 1, and each race
    is listed, if there is one.
    """
    from gpunet.records import check_races

    _, _, program = created(net, **options)
    program.prepare()
    races = check_races(program)
    schedules = [s.compiled.schedule for s in program.segments() if s.compiled is not None]
    steps = sum(len(schedule.items) for schedule in schedules)
    lanes = len({lane for schedule in schedules for lane in schedule.lanes})
    waits = sum(len(item.waits) for schedule in schedules for item in schedule.items)
    summary = f"{count(steps, 'step')} in {count(lanes, 'lane')}, {count(waits, 'wait')}"
    for race in races:
        click.echo(str(race))
    if races:
        click.secho(f"{summary}: {count(len(races), 'race')}", fg="red")
        click.get_current_context().exit(1)
    click.echo(f"{summary}: no two touch the same bytes in no fixed order")

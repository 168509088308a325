"""``gpunet time``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpunet.cli import Command
from gpunet.cli.nets import created, net_options

if TYPE_CHECKING:
    from rich.table import Table

    from gpunet.profiler import OperatorTime, Peak, Profile

_SORTS: Final = ("time", "order", "flops", "bytes", "type")


@click.command(cls=Command)
@net_options
@click.option("--iterations", type=click.IntRange(min=1), default=10, show_default=True, metavar="N")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Runs before."
)
@click.option("--sort", type=click.Choice(_SORTS), default="time", show_default=True, help="Of the table.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a timeline for https://ui.perfetto.dev or chrome://tracing (JSON).",
)
@click.option(
    "--memory",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the use of memory (PNG; needs matplotlib).",
)
@click.option("--nvtx", is_flag=True, help="Put NVTX ranges around operators (needs CuPy).")
def command(
    net: str,
    iterations: int,
    warmup: int,
    sort: str,
    trace: Path | None,
    memory: Path | None,
    nvtx: bool,
    **options: Any,
) -> None:
    """Time NET, and each of its operators.

    NET is the folder of a saved model, a file with a net, or zoo:MODEL. FLOP/s and bytes/s are those of one
    operator; "roofline" is the share of what the machine reaches in a matrix product or a copy, whichever
    binds. --detect-nan is for finding an error: its own time is in the times.
    """
    from rich.console import Console

    from gpunet.observers import attach
    from gpunet.profiler import nvtx_ranges, profile
    from gpunet.timeline import save_memory, save_trace
    from gpunet.training.curve import INSTALL_HINT, can_draw

    if memory is not None and not can_draw():
        raise click.UsageError(f"--memory needs matplotlib: {INSTALL_HINT}")
    _, workspace, program = created(net, **options)
    if nvtx:
        attach(program, nvtx_ranges())
    found = profile(workspace, program.name, iterations, warmup)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print(operator_table(found, sort))
    console.print(type_table(found))
    milliseconds = [1000 * seconds for seconds in found.seconds]
    click.echo(
        f"{found.net} on {workspace.device}, engine {program.options.engine}: "
        f"{1000 * found.mean:,.3f} ms a run (fastest {min(milliseconds):,.3f}, {iterations} runs), "
        f"{1000 * found.operator_seconds:,.3f} ms in operators when each is timed"
    )
    if trace is not None:
        save_trace(trace, found)
        click.echo(f"timeline: {trace}")
    if memory is not None:
        save_memory(memory, program)
        click.echo(f"memory: {memory}")


def operator_table(profile: Profile, sort: str = "time") -> Table:
    """A row for each operator."""
    from rich.table import Table

    from gpunet.profiler import peak, sort_operators

    peaks: dict[Any, Peak] = {}
    total = max(profile.operator_seconds, 1e-12)
    table = Table(title=f"{profile.net}: {len(profile.operators)} operators")
    for title in ("operator", "name", "shape", "lane"):
        table.add_column(title, no_wrap=title != "name", overflow="fold")
    for title in ("ms", "share", "GFLOP/s", "GB/s", "roofline"):
        table.add_column(title, justify="right", no_wrap=True)
    for op in sort_operators(profile.operators, sort):
        device = op.lane.device
        if device not in peaks:
            peaks[device] = peak(device)
        table.add_row(
            op.type,
            op.name.replace("[", r"\["),
            op.shape,
            str(op.lane),
            f"{1000 * op.mean:.3f}",
            f"{op.mean / total:.1%}",
            _rate(op, lambda o: o.flops, lambda o: o.flops_per_second),
            _rate(op, lambda o: o.bytes, lambda o: o.bytes_per_second),
            f"{op.share(peaks[device]):.1%}",
        )
    return table


def _rate(
    op: OperatorTime, amount: Callable[[OperatorTime], int], rate: Callable[[OperatorTime], float]
) -> str:
    return f"{rate(op) / 1e9:.2f}" if amount(op) else ""


def type_table(profile: Profile) -> Table:
    """A row for each type of operator."""
    from rich.table import Table

    total = max(profile.operator_seconds, 1e-12)
    table = Table(title="by type")
    table.add_column("type", no_wrap=True)
    for title in ("number", "ms", "share", "GFLOP", "MB"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in profile.by_type():
        table.add_row(
            row.type,
            str(row.count),
            f"{1000 * row.seconds:.3f}",
            f"{row.seconds / total:.1%}",
            f"{row.flops / 1e9:.3f}",
            f"{row.bytes / 1e6:.2f}",
        )
    return table

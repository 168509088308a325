"""The command line of the benchmarks."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
from rich.console import Console

from gpunet.errors import GpunetError

from .figures import FIGURES
from .rows import Row

#: Of tables where there is no terminal.
WIDTH = 160


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measures the figures NAME (all of them, if none is given), beside PyTorch on the CPU where it is "
    "installed, and says which bars are met.",
)
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(list(FIGURES)))
@click.option("--quick", is_flag=True, help="Fewer repeats: under a minute for all, and less exact.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write results to this file; - prints them."
)
@click.option(
    "--markdown",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write results into this document, between its marks for them.",
)
@click.option(
    "--save",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep results in this folder, in the file of this machine, beside figures that stand there already; "
    "--markdown then writes all of them.",
)
@click.option("--list", "list_", is_flag=True, help="Say what figures there are, and measure nothing.")
def main(
    names: tuple[str, ...],
    quick: bool,
    json_path: Path | None,
    markdown: Path | None,
    folder: Path | None,
    list_: bool,
) -> None:
    """Runs the benchmarks; the exit status is 1 if a figure could not be measured, whatever the bars say."""
    if list_:
        for name, figure in FIGURES.items():
            click.echo(f"{name:12s} {figure.doc}")
        return

    from . import load, machine, report, timing

    # Where JSON goes to standard output, the rest goes elsewhere.
    console = Console(stderr=str(json_path) == "-", highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    described = machine.describe()
    for name, value in described.items():
        console.print(f"{name:7s} {value}", markup=False, soft_wrap=True)
    others = load.Others()
    rows: list[Row] = []
    failed = []
    for name in dict.fromkeys(names) or FIGURES:
        start = time.perf_counter()
        try:
            with console.status(f"measuring {name}"):
                rows += FIGURES[name].measure(timing.QUICK if quick else timing.FULL)
        except GpunetError as error:
            failed.append(name)
            console.print(f"{name} could not be measured: {error}", style="red", markup=False, soft_wrap=True)
        else:
            console.print(f"{name}: measured in {time.perf_counter() - start:.0f} s")
    described["load"] += f", {machine.load()} at the end; other processes kept {others} cores busy"
    console.print(report.table(rows))
    console.print(f"{report.verdict(rows)}; load {described['load']}")
    if json_path is not None:
        report.write_json(json_path, described, rows)
    try:
        if folder is not None:
            measured = [name for name in dict.fromkeys(names) or FIGURES if name not in failed]
            saved = report.read(report.save(folder, described, rows, measured))
            described, rows = saved.described, saved.rows
        if markdown is not None:
            report.write_markdown(markdown, described, rows)
    except GpunetError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(prog_name=f"python -m {__package__}")

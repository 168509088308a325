"""``gpunet check-grad``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpunet.cli import Command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpunet.operator_check import Outcome


@click.command(cls=Command)
@click.argument("operator")
@click.option(
    "--device",
    "devices",
    multiple=True,
    help="sim:N or cuda:N to compare with the CPU, several times for several; by default what is here.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="'SHAPE ...'",
    help="The inputs of one sample, as '2x3x6x6 4x3x3x3 +4 int32:6': + is positive, ~ between -1 and 1. "
    "Several times for several samples; by default some that fit.",
)
@click.option("--arg", "args", multiple=True, metavar="NAME=VALUE", help="An argument; 1,2 is a list.")
@click.option("--engine", default="", help="The engine whose kernels run, DIRECT for convolutions, say.")
@click.option("--seed", default=0, show_default=True, help="Of the values of the inputs.")
def command(
    operator: str,
    devices: tuple[str, ...],
    shapes: tuple[str, ...],
    args: tuple[str, ...],
    engine: str,
    seed: int,
) -> None:
    """Check OPERATOR, a type or module:TYPE of your own.

    The module is imported from the current folder. Its gradient is compared with differences (relative 1e-4,
    absolute 1e-7), its results on devices with the CPU's (float32 to 1e-5), and on the simulated device each
    kernel runs in several orders of its threads. The exit status is 1 if a check fails.
    """
    from rich.console import Console

    from gpunet.operator_check import FAILED, check_operator, find_operator, samples

    type = find_operator(operator)
    found = samples(type, shapes, dict(map(_argument, args)), engine=engine, seed=seed)
    chosen, absent = (list(devices), []) if devices else _devices()
    _open(chosen)
    outcomes = check_operator(type, found, chosen)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    console.print(_table(outcomes))
    for line in absent:
        console.print(line, style="yellow", markup=False)
    failed = sum(1 for outcome in outcomes if outcome.status == FAILED)
    console.print(f"{len(outcomes)} checks of {type}, {failed} failed", style="red" if failed else "green")
    click.get_current_context().exit(1 if failed else 0)


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r}, wanted NAME=VALUE", param_hint="--arg")
    if "," in value:
        return name, [_value(part) for part in value.split(",") if part]
    return name, _value(value)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _devices() -> tuple[list[str], list[str]]:
    """The devices that are here; and why others are not."""
    from gpunet.backends import backend
    from gpunet.devices import gpu_count, parse_device
    from gpunet.errors import DeviceError

    found, absent = [], []
    for name in ["sim:0", *(["cuda:0"] if gpu_count() else [])]:
        try:
            backend(parse_device(name))
        except DeviceError as error:
            absent.append(f"not compared on {name}: {error}")
        else:
            found.append(name)
    return found, absent


def _open(devices: Sequence[str]) -> None:
    """Raises DeviceError for a device that is not here."""
    from gpunet.backends import backend
    from gpunet.devices import CPU, parse_device

    for name in devices:
        device = parse_device(name)
        if device == CPU:
            raise click.BadParameter(
                f"{name!r} is what others are compared with, wanted sim:N or cuda:N", param_hint="--device"
            )
        backend(device)


def _table(outcomes: Sequence[Outcome]) -> Any:
    from rich.table import Table

    from gpunet.operator_check import FAILED, OK

    styles = {OK: "green", FAILED: "red"}
    table = Table("inputs", "operator", "check", "result", "error, of the allowed", "")
    table.columns[4].justify = "right"
    previous = ""
    for outcome in outcomes:
        error = "" if outcome.error is None else f"{outcome.error:.1%}"
        sample = "" if outcome.sample == previous else outcome.sample
        if sample:
            table.add_section()
        table.add_row(
            sample,
            outcome.operator,
            outcome.check,
            outcome.status,
            error,
            outcome.detail.replace("[", r"\["),
            style=styles.get(outcome.status),
        )
        previous = outcome.sample
    return table

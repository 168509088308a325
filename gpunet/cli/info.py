"""``gpunet info``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunet.cli import Command
from gpunet.cli.nets import input_specs, load_files

if TYPE_CHECKING:
    from gpunet.analysis import NetCost
    from gpunet.export import LoadedModel
    from gpunet.specs import TensorSpec


@click.command(cls=Command)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Samples a run.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME=SHAPE[:TYPE]",
    help="Shape of an input, like data=1x3x224x224, where the model does not tell it.",
)
def command(model: Path, batch_size: int, inputs: tuple[str, ...]) -> None:
    """Describe a saved model.

    MODEL is a folder or a predict net. Peak memory is the largest sum of the tensors that are needed at the
    same time, and of the parameters.
    """
    from rich.console import Console
    from rich.table import Table

    from gpunet.analysis import net_cost
    from gpunet.inference import infer
    from gpunet.specs import TensorSpec

    loaded, note = load_files(model)
    parameters = {name: TensorSpec(*known) for name, known in infer(loaded.init_net, {}).items()}
    parameters = {name: parameters[name] for name in loaded.predict_net.external_input if name in parameters}
    specs = input_specs(loaded, inputs, batch_size)
    for name in loaded.inputs:
        parameters.pop(name, None)
    cost = net_cost(loaded.predict_net, specs, parameters)
    table = Table(title=f"{loaded.predict_net.name or loaded.path.stem}: {len(cost.operators)} operators")
    table.add_column("operator", no_wrap=True)
    table.add_column("output", overflow="fold")
    table.add_column("shape", overflow="fold")
    table.add_column("FLOPs", justify="right", no_wrap=True)
    for operator in cost.operators:
        shape = str(operator.outputs[0]) if operator.outputs and operator.outputs[0] else "?"
        flops = "?" if operator.flops is None else f"{operator.flops:,}"
        table.add_row(operator.op.type, ", ".join(operator.op.outputs[:1]), shape, flops)
    console = Console()
    console.print(table)
    for name, text in _totals(loaded, cost, specs):
        click.echo(f"{name + ':':18}{text}")
    if note:
        click.echo(note)


def _totals(model: LoadedModel, cost: NetCost, specs: dict[str, TensorSpec]) -> list[tuple[str, str]]:
    inputs = ", ".join(f"{name} ({specs[name]})" if name in specs else name for name in model.inputs)
    unknown = "not known without the shapes of all inputs and parameters"
    return [
        ("inputs", inputs or "none"),
        ("outputs", ", ".join(model.outputs)),
        (
            "parameters",
            f"{cost.parameter_count:,} in {len(cost.parameters)} blobs, {_bytes(cost.parameter_bytes)}",
        ),
        ("FLOPs", unknown if cost.flops is None else f"{cost.flops:,}"),
        ("peak memory", unknown if cost.peak_bytes is None else _bytes(cost.peak_bytes)),
    ]


def _bytes(size: int) -> str:
    """``1,234 bytes``, or a number in the largest unit below it."""
    number, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{size:,} bytes" if unit == "bytes" else f"{number:,.1f} {unit} ({size:,} bytes)"

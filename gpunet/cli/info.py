"""``gpunet info``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpunet.cli import Command
from gpunet.cli.nets import LoadedNet, count, load_net, net_argument

if TYPE_CHECKING:
    from gpunet.analysis import NetCost


@click.command(cls=Command)
@net_argument
def command(net: str, inputs: tuple[str, ...], batch_size: int | None, init_net: Path | None) -> None:
    """Describe NET: its operators, parameters, FLOPs and memory.

    NET is the folder of a saved model, a file with a net, or zoo:MODEL. Peak memory is the largest sum of the
    tensors that are needed at the same time, and of the parameters.
    """
    from rich.console import Console
    from rich.table import Table

    from gpunet.analysis import net_cost
    from gpunet.inference import infer
    from gpunet.specs import TensorSpec

    loaded = load_net(net, inputs, batch_size, init_net, runs=False)
    made = infer(loaded.init_net, {})
    parameters = {
        name: TensorSpec(*made[name])
        for name in loaded.net.external_input
        if name in made and name in loaded.parameters
    }
    cost = net_cost(loaded.net, loaded.inputs, parameters)
    table = Table(title=f"{loaded.net.name or Path(net).stem}: {len(cost.operators)} operators")
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
    for name, text in _totals(loaded, cost):
        click.echo(f"{name + ':':18}{text}")


def _totals(net: LoadedNet, cost: NetCost) -> list[tuple[str, str]]:
    inputs = ", ".join([*(f"{name} ({known})" for name, known in net.inputs.items()), *net.unknown])
    unknown = "not known without the shapes of all inputs and parameters"
    made = {name for op in net.init_net.op for name in op.output}
    missing = len(net.parameters - made)
    blobs = count(len(cost.parameters), "blob")
    parameters = f"{cost.parameter_count:,} in {blobs}, {_bytes(cost.parameter_bytes)}"
    if missing or net.remark:
        of = f" of {count(missing, 'blob')}" if missing else ""
        parameters = f"not known{of}: {net.remark or 'the init net does not make them'}"
    return [
        ("inputs", inputs or "none"),
        ("outputs", ", ".join(net.outputs) or "none"),
        ("parameters", parameters),
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

"""``gpunet draw``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpunet.cli import Command
from gpunet.cli.nets import count, created, net_options


@click.command(cls=Command)
@net_options
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to: a name that ends in .svg, or in .dot for Graphviz.",
)
def command(net: str, out: Path, **options: Any) -> None:
    """Draw the compiled NET: operators in the colour of their lane, shapes at the edges.

    NET is the folder of a saved model, a file with a net, or zoo:MODEL. Parameters are named in the boxes
    that read them. Edges that cross lanes are dashed.
    """
    from gpunet.drawing import diagram, dot, svg
    from gpunet.serialization import atomic_write

    writers = {".svg": svg, ".dot": dot}
    writer = writers.get(out.suffix)
    if writer is None:
        raise click.BadParameter(
            f"found {str(out)!r}, wanted a name that ends in {' or '.join(writers)}", param_hint="--out"
        )
    loaded, _, program = created(net, **options)
    program.prepare()
    picture = diagram(program, loaded.parameters)
    atomic_write(out, writer(picture).encode())
    operators = sum(1 for box in picture.boxes if box.lane is not None)
    click.echo(f"{out}: {count(operators, 'operator')} in {count(len(picture.lanes), 'lane')}")

"""How much of the reduction of gradients the backward pass hides, measured under mpirun.

    mpirun -n 2 python -m bench.overlap

Each rank trains ResNet-20 on its part of a batch and notes when each operator begins and ends. Hidden is the
part of the time in Allreduce of gradients during which the same rank computes, of all ranks together. Time
that a rank waits in it for another one counts; how much of it that is, and what is hidden of the rest, is
told beside it. The batch norm is each rank's own: sums that the forward pass waits for cannot be hidden.

Other processes slow down one rank more than another, which then waits. So steps beside which others did
little are told apart.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np

from bench.load import QUIET, Others, wait_until_quiet
from gpunet.data import load_dataset
from gpunet.distributed import world
from gpunet.observers import Call, observe
from gpunet.training import Ranks, Settings, make_trainer

_WARM_UP = 3


@dataclass(frozen=True)
class Overlap:
    """Medians over steps, of means over the ranks.

    Attributes:
        steps: how many.
        other_load: cores that other processes kept busy meanwhile; ``None`` where the system does not tell.
        ranks: number of processes.
        compression: of gradients.
        bucket_mib: size of buckets; ``None`` for the size that is chosen without a word.
        buckets: how many there are.
        step: seconds of a step.
        reducing: seconds in Allreduce.
        hidden: part of them during which the rank computes.
        waiting: seconds in Allreduce until all ranks have come.
        hidden_since: part of the time since then during which the rank computes.
        sent_bytes: bytes of gradients that a rank gives to Allreduce in a step.
    """

    steps: int
    other_load: float | None
    ranks: int
    compression: str
    bucket_mib: float | None
    buckets: int
    step: float
    reducing: float
    hidden: float
    waiting: float
    hidden_since: float
    sent_bytes: int


def measure(steps: int, batch: int, bucket_mib: float | None, compression: str) -> dict[str, Overlap]:
    """Trains some steps on all ranks; ``all`` steps, and the ``quiet`` ones, if there are some."""
    settings = Settings.of("resnet20", 0, batch_size=batch, epochs=steps + _WARM_UP)
    ranks = Ranks(compression, bucket_mib, sync_batch_norm=False)
    trainer = make_trainer(settings, load_dataset("digits"), device="cpu", ranks=ranks)
    parallel = trainer.ranks
    if parallel is None:
        raise click.UsageError("the trainer has no ranks")
    # What compression makes of a bucket has its name in front.
    buckets = {blob for b in parallel.buckets for blob in (b.name, f"{b.name}_half", f"{b.name}_left")}
    begun: dict[int, float] = {}
    together: list[float] = []
    _note_when_all_have_come(together)
    reducing: list[tuple[float, float]] = []
    since: list[tuple[float, float]] = []
    computing: list[tuple[float, float]] = []

    def before(call: Call) -> None:
        begun[id(call)] = time.perf_counter()

    def after(call: Call) -> None:
        span = (begun[id(call)], time.perf_counter())
        if call.step.lane.number == 0:
            computing.append(span)
        elif call.type == "Allreduce" and call.node.outputs[0].name in buckets:
            reducing.append(span)
            since.append((together[-1] if together else span[0], span[1]))

    found: list[tuple[float, ...]] = []
    for number in range(steps + _WARM_UP):
        for spans in (reducing, since, computing):
            spans.clear()
        world().barrier()
        others, start = Others(), time.perf_counter()
        with observe(trainer.workspace, trainer.model.net, before=before, after=after):
            trainer.make_step()
        seconds = time.perf_counter() - start
        sums = [
            seconds,
            *(sum(b - a for a, b in spans) for spans in (reducing, since)),
            *(sum(_common(span, computing) for span in spans) for spans in (reducing, since)),
        ]
        step, total, moving, hidden, hidden_since = np.mean(world().all_gather_object(sums), axis=0)
        load = _other_load(world().all_gather_object(others.taken()))
        if number >= _WARM_UP:
            found.append((load, step, total, hidden / total, total - moving, hidden_since / moving))

    def overlap(rows: list[tuple[float, ...]]) -> Overlap:
        load, *medians = (float(statistics.median(values)) for values in zip(*rows, strict=True))
        sent, count = parallel.traffic().sent_bytes, len(parallel.buckets)
        told = None if math.isnan(load) else load
        return Overlap(len(rows), told, world().size, compression, bucket_mib, count, *medians, sent)

    quiet = [row for row in found if row[0] <= QUIET]
    return {"all": overlap(found)} | ({"quiet": overlap(quiet)} if quiet else {})


def _other_load(taken: list[tuple[float, float, float] | None]) -> float:
    """Cores that others than the ranks, all of one host, kept busy; NaN where it is not known."""
    known = [item for item in taken if item is not None]
    if len(known) < len(taken):
        return math.nan
    busy, _, seconds = known[0]
    return max(0.0, busy - sum(own for _, own, _ in known)) / seconds


def _note_when_all_have_come(times: list[float]) -> None:
    """Notes the end of the exchange before each operation, at which ranks wait for each other."""
    ranks: Any = world()
    agree = ranks._agree

    def timed(*arguments: Any) -> None:
        agree(*arguments)
        times.append(time.perf_counter())

    ranks._agree = timed


def _common(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Seconds of a span in which one of the others, which follow each other, is under way."""
    return sum(max(0.0, min(span[1], b) - max(span[0], a)) for a, b in others)


@click.command()
@click.option("--steps", default=10, show_default=True, help="Steps that count.")
@click.option("--batch-size", default=128, show_default=True, help="Images a step, on all ranks together.")
@click.option("--bucket-mib", type=float, help="Gradients that are reduced together.")
@click.option("--compression", default="none", show_default=True, help="Of gradients.")
@click.option("--patience", default=0.0, help="Seconds to wait for other processes to do little.")
def main(steps: int, batch_size: int, bucket_mib: float | None, compression: str, patience: float) -> None:
    """Measure the overlap of reductions and the backward pass; prints JSON."""
    if world().rank == 0:
        wait_until_quiet(patience)
    result = measure(steps, batch_size, bucket_mib, compression)
    if world().rank == 0:
        click.echo(json.dumps({name: asdict(found) for name, found in result.items()}, indent=2))


if __name__ == "__main__":
    main()

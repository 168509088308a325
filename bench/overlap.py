"""How much of the reduction of gradients the backward pass hides, measured under mpirun.

    mpirun -n 2 python -m bench.overlap

Each rank trains ResNet-20 on its part of a batch and notes when each operator begins and ends. Hidden is the
part of the time in Allreduce of gradients during which the same rank computes. Time that a rank waits in it
for another one counts; how much of it that is, and what is hidden of the rest, is told beside it. The batch
norm is each rank's own: sums that the forward pass waits for cannot be hidden.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from gpunet.data import load_dataset
from gpunet.distributed import world
from gpunet.observers import Call, observe
from gpunet.training import Ranks, Settings, make_trainer

_WARM_UP = 3


@dataclass(frozen=True)
class Overlap:
    """Medians over steps, of rank 0.

    Attributes:
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


def measure(steps: int, batch: int, bucket_mib: float | None, compression: str) -> Overlap:
    """Trains some steps on all ranks."""
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

    found = []
    for number in range(steps + _WARM_UP):
        reducing.clear()
        since.clear()
        computing.clear()
        world().barrier()
        start = time.perf_counter()
        with observe(trainer.workspace, trainer.model.net, before=before, after=after):
            trainer.make_step()
        if number >= _WARM_UP:
            total = sum(b - a for a, b in reducing)
            hidden = sum(_common(span, computing) for span in reducing)
            moving = sum(b - a for a, b in since)
            part = sum(_common(span, computing) for span in since) / moving
            found.append((time.perf_counter() - start, total, hidden / total, total - moving, part))
    medians = [statistics.median(values) for values in zip(*found, strict=True)]
    sent = parallel.traffic().sent_bytes
    return Overlap(world().size, compression, bucket_mib, len(parallel.buckets), *medians, sent)


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
def main(steps: int, batch_size: int, bucket_mib: float | None, compression: str) -> None:
    """Measure the overlap of reductions and the backward pass; prints JSON."""
    result = measure(steps, batch_size, bucket_mib, compression)
    if world().rank == 0:
        click.echo(json.dumps(asdict(result), indent=2))


if __name__ == "__main__":
    main()

"""Data parallelism on paper: the efficiency of 8 to 1,024 GPUs, from times, bytes and a model of the network.

A ring moves ``2 (n - 1) / n`` of the bytes over each link in ``2 (n - 1)`` messages, a double binary tree
twice the bytes in ``2 log2 n`` messages; within a node it is a ring over its GPUs, and each level adds its
time. Buckets are reduced one after the other as soon as the backward pass has made them, as in nets of
``gpunet.distributed``. The part of its line rate that TCP gets, and the time of a step without communication,
are fitted to two of the four points that ChainerMN published (https://chainer.org, 25 May 2018); the other
two are predicted.

    python -m bench.scaling_model            predictions
    python -m bench.scaling_model --check    the published points
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from gpunet.distributed.buckets import LARGEST, SHARES

_MIB: Final = 1 << 20
_HALF: Final = 0.5


@dataclass(frozen=True)
class Link:
    """A network: seconds a message, and bytes a second that each GPU, or each node, sends and receives."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of several GPUs each, one link within a node and one between nodes."""

    gpus_per_node: int
    inside: Link
    between: Link


@dataclass(frozen=True)
class Work:
    """What one GPU does in a step.

    Attributes:
        gradients: elements, float32.
        forward, backward: seconds.
        bucket_bytes, first_bucket_bytes: as of ``gpunet.distributed.data_parallel.parallelize``.
        overlap: whether buckets are reduced while the backward pass goes on, or behind it in one piece.
        stale: whether the reduction of a step goes on during the next step (double buffering).
        compressed: whether gradients are sent in float16.
    """

    gradients: int
    forward: float
    backward: float
    bucket_bytes: int | None = None
    first_bucket_bytes: int = _MIB
    overlap: bool = True
    stale: bool = False
    compressed: bool = False


def ring(n: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce of ``size`` bytes around a ring."""
    return 2 * (n - 1) * (link.latency + size / n / link.bandwidth) if n > 1 else 0.0


def tree(n: int, size: float, link: Link) -> float:
    """Seconds of an all-reduce of ``size`` bytes up and down a double binary tree, in pipelined pieces."""
    return 2 * math.ceil(math.log2(n)) * link.latency + 2 * size / link.bandwidth if n > 1 else 0.0


def all_reduce(gpus: int, size: float, cluster: Cluster) -> float:
    """Seconds of an all-reduce: a ring within nodes, and the quicker of ring and tree between them."""
    inside = min(gpus, cluster.gpus_per_node)
    nodes = -(-gpus // cluster.gpus_per_node)
    across = min(kind(nodes, size, cluster.between) for kind in (ring, tree))
    return ring(inside, size, cluster.inside) + across


def buckets(work: Work) -> list[int]:
    """Bytes of the gradients of each bucket, as float32."""
    left, sizes = 4 * work.gradients, []
    chosen = min(LARGEST, -(-left // SHARES)) if work.bucket_bytes is None else work.bucket_bytes
    while left > 0:
        sizes.append(min(left, chosen if sizes else min(chosen, work.first_bucket_bytes)))
        left -= sizes[-1]
    return sizes


def step_seconds(gpus: int, work: Work, cluster: Cluster) -> float:
    """Seconds of a step on so many GPUs.

    The backward pass makes gradients at an even rate.
    """
    factor = _HALF if work.compressed else 1.0
    compute = work.forward + work.backward
    whole = 4 * work.gradients
    if work.stale:
        return max(compute, all_reduce(gpus, whole * factor, cluster))
    if not work.overlap:
        return compute + all_reduce(gpus, whole * factor, cluster)
    made, free = 0, 0.0
    for size in buckets(work):
        made += size
        ready = work.forward + work.backward * made / whole
        free = max(ready, free) + all_reduce(gpus, size * factor, cluster)
    return max(compute, free)


def efficiency(gpus: int, work: Work, cluster: Cluster, base: int = 1) -> float:
    """Throughput of so many GPUs over that of ``base``, each divided by its number of GPUs."""
    return step_seconds(base, work, cluster) / step_seconds(gpus, work, cluster)


# Published points

#: ResNet-50 on ImageNet, 90 epochs, 32 images a GPU and step.
PARAMETERS: Final = 25_557_032
IMAGES: Final = 90 * 1_281_167
BATCH: Final = 32
#: Hours on 32 P100, four nodes of eight, by network; and efficiency from 8 to 32 V100 on 25 Gbit/s.
HOURS_INFINIBAND: Final = 6.96
HOURS_ETHERNET: Final = 21.3
HOURS_STALE_HALF: Final = 7.71
EFFICIENCY_V100: Final = 0.96
#: How much quicker a V100 is taken to be than a P100 at this work.
V100_OVER_P100: Final = 1.8
_PCIE: Final = Link(10e-6, 10e9)
_NVLINK_1: Final = Link(8e-6, 60e9)
_INFINIBAND_FDR: Final = Link(5e-6, 6.0e9)
_TCP_LATENCY: Final = 50e-6
_GBIT: Final = 1e9 / 8


@dataclass(frozen=True)
class Point:
    """A published number beside that of the model; ``fitted`` ones determine its constants."""

    what: str
    published: float
    model: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative difference."""
        return abs(self.model - self.published) / self.published


def published_points() -> list[Point]:
    """The points of ChainerMN, two of them fitted."""
    gpus, steps = 32, IMAGES / (32 * BATCH)
    infiniband = Cluster(8, _PCIE, _INFINIBAND_FDR)
    plain = Work(PARAMETERS, 0.0, 0.0, overlap=False)
    # The time of the computation is what InfiniBand leaves of a step.
    compute = HOURS_INFINIBAND * 3600 / steps - step_seconds(gpus, plain, infiniband)
    work = replace(plain, forward=compute / 3, backward=2 * compute / 3)
    part = _fit_tcp(work, gpus, HOURS_ETHERNET * 3600 / steps)
    ethernet = Cluster(8, _PCIE, Link(_TCP_LATENCY, 10 * _GBIT * part))
    stale = replace(work, stale=True, compressed=True)
    faster = replace(stale, forward=stale.forward / V100_OVER_P100, backward=stale.backward / V100_OVER_P100)
    amazon = Cluster(8, _NVLINK_1, Link(_TCP_LATENCY, 25 * _GBIT * part))

    def hours(chosen: Work, cluster: Cluster) -> float:
        return step_seconds(gpus, chosen, cluster) * steps / 3600

    return [
        Point("hours, InfiniBand", HOURS_INFINIBAND, hours(work, infiniband), True),
        Point("hours, 10 Gbit/s", HOURS_ETHERNET, hours(work, ethernet), True),
        Point("hours, 10 Gbit/s, float16, stale", HOURS_STALE_HALF, hours(stale, ethernet), False),
        Point(
            "efficiency 8 to 32 V100, 25 Gbit/s, float16, stale",
            EFFICIENCY_V100,
            efficiency(gpus, faster, amazon, base=8),
            False,
        ),
    ]


def _fit_tcp(work: Work, gpus: int, seconds: float) -> float:
    """The part of 10 Gbit/s with which a step takes so many seconds, by halving."""
    low, high = 0.01, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        cluster = Cluster(8, _PCIE, Link(_TCP_LATENCY, 10 * _GBIT * middle))
        low, high = (middle, high) if step_seconds(gpus, work, cluster) > seconds else (low, middle)
    return (low + high) / 2


# Predictions

_NVLINK_4: Final = Link(4e-6, 360e9)
_INFINIBAND_NDR: Final = Link(5e-6, 8 * 45e9)
#: Nodes of eight GPUs, by name: an adapter of 400 Gbit/s each, one of 100 Gbit/s a node, and 25 Gbit/s.
CLUSTERS: Final = {
    "NVLink 4, InfiniBand 8 x 400 Gbit/s": Cluster(8, _NVLINK_4, _INFINIBAND_NDR),
    "NVLink 1, InfiniBand 100 Gbit/s": Cluster(8, _NVLINK_1, Link(5e-6, 11e9)),
    "NVLink 1, Ethernet 25 Gbit/s": Cluster(8, _NVLINK_1, Link(_TCP_LATENCY, 25 * _GBIT * 0.9)),
}
#: Gradients, and seconds of a step of one GPU, assumed where no measured ones are given.
MODELS: Final = {"resnet50": (PARAMETERS, 0.060), "transformer": (340_000_000, 0.300)}
COUNTS: Final = (8, 16, 32, 64, 128, 256, 512, 1024)


def predictions(seconds: dict[str, float], counts: Sequence[int] = COUNTS) -> list[dict[str, object]]:
    """Efficiency by model, cluster, compression and number of GPUs."""
    rows: list[dict[str, object]] = []
    for name, (gradients, assumed) in MODELS.items():
        compute = seconds.get(name, assumed)
        for network, cluster in CLUSTERS.items():
            for compressed in (False, True):
                work = Work(gradients, compute / 3, 2 * compute / 3, compressed=compressed)
                rows.append(
                    {
                        "model": name,
                        "cluster": network,
                        "sent": "float16" if compressed else "float32",
                        "efficiency": {n: round(efficiency(n, work, cluster), 4) for n in counts},
                    }
                )
    return rows


@click.command()
@click.option("--check", is_flag=True, help="Compare with published points instead.")
@click.option("--resnet50", type=float, metavar="S", help="Measured seconds of a step of one GPU.")
@click.option(
    "--transformer", type=float, metavar="S", help="The same for a Transformer of 340 million parameters."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(check: bool, resnet50: float | None, transformer: float | None, as_json: bool) -> None:
    """Predict the efficiency of data parallelism."""
    console = Console()
    if check:
        points = published_points()
        if as_json:
            click.echo(json.dumps([{**asdict(p), "error": p.error} for p in points], indent=2))
            return
        table = Table("point", "published", "model", "off by", "")
        for p in points:
            use = "fitted" if p.fitted else "predicted"
            table.add_row(p.what, f"{p.published:g}", f"{p.model:.3g}", f"{p.error:.1%}", use)
        console.print(table)
        return
    given = {"resnet50": resnet50, "transformer": transformer}
    rows = predictions({name: value for name, value in given.items() if value is not None})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("model", "cluster", "sent", *(str(n) for n in COUNTS))
    for row in rows:
        found = row["efficiency"]
        shares = [f"{share:.0%}" for share in found.values()] if isinstance(found, dict) else []
        table.add_row(str(row["model"]), str(row["cluster"]), str(row["sent"]), *shares)
    console.print(table)


if __name__ == "__main__":
    main()

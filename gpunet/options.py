"""What can be chosen when a net is created: the engine, how wide it runs, what is kept, which passes run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from gpunet.cores import usable_cores
from gpunet.errors import NetError
from gpunet.proto import NetDef

SIMPLE: Final = "simple"
ASYNC: Final = "async_scheduling"
GRAPH: Final = "graph"

#: The engine of each net type. Those of Caffe2 that run in order map to ``simple``, those with a scheduler to
#: ``async_scheduling``.
ENGINES: Final = {
    "": SIMPLE,
    "simple": SIMPLE,
    "simple_refcount": SIMPLE,
    "async_simple": SIMPLE,
    "singlethread_async": SIMPLE,
    "rnn": SIMPLE,
    "dag": ASYNC,
    "prof_dag": ASYNC,
    "async_dag": ASYNC,
    "async_polling": ASYNC,
    "async_scheduling": ASYNC,
    "parallel": ASYNC,
    "graph": GRAPH,
}


#: The name by which the assignment of lanes is switched off.
SCHEDULE: Final = "schedule"


@dataclass(frozen=True)
class Options:
    """How a net is compiled and run.

    Attributes:
        engine: ``simple``, ``async_scheduling`` or ``graph``.
        workers: CPU lanes of ``async_scheduling``; by default one for each core that the process may use.
        streams: streams on each GPU.
        keep: blobs that can be fetched after a run, beside those that the net reads and writes; ``None``
            keeps all.
        without: names of passes that are switched off.
        recompute: number of segments of the forward pass whose activations are computed again for the
            backward pass (0 chooses one), which saves memory and costs time; ``None`` keeps all activations.
    """

    engine: str = SIMPLE
    workers: int = 1
    streams: int = 1
    keep: frozenset[str] | None = None
    without: frozenset[str] = field(default_factory=frozenset)
    recompute: int | None = None

    @property
    def lanes(self) -> dict[str, int]:
        """Number of lanes of each device kind."""
        if self.engine == SIMPLE or SCHEDULE in self.without:
            return {}
        return {"cpu": self.workers, "cuda": self.streams, "sim": self.streams}


def options_of(
    net: NetDef,
    *,
    engine: str | None = None,
    workers: int | None = None,
    streams: int | None = None,
    keep: Collection[str] | None = None,
    without: Collection[str] = (),
    recompute: int | None = None,
) -> Options:
    """The options of a net: what is given, else what its ``type``, ``num_workers`` and ``external_output``
    say.

    A net that declares external outputs keeps those; one that declares none keeps all blobs.

    Raises:
        NetError: an unknown engine, or a number that makes no sense.
    """
    name = net.type if engine is None else engine
    if name not in ENGINES:
        wanted = ", ".join(sorted(filter(None, ENGINES)))
        raise NetError(f"net {net.name!r} has type {name!r}, wanted one of {wanted}")
    chosen = net.num_workers if workers is None else workers
    if chosen < 0 or (streams is not None and streams < 1):
        raise NetError(
            f"net {net.name!r}: workers is {chosen} and streams {streams}, wanted 0 or more and 1 or more"
        )
    for option, given in (("keep", keep), ("without", without)):
        if isinstance(given, str):
            raise NetError(f"net {net.name!r}: {option} is the text {given!r}, wanted names, as [{given!r}]")
    if keep is None and net.external_output:
        keep = net.external_output
    return Options(
        ENGINES[name],
        chosen or len(usable_cores()),
        4 if streams is None else streams,
        None if keep is None else frozenset(keep),
        frozenset(without),
        recompute,
    )

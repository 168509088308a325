"""The order in which passes run on the graph of a segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpunet.devices import Device
from gpunet.errors import NetError
from gpunet.graph import Graph
from gpunet.options import SCHEDULE
from gpunet.passes.batch_norm_folding import fold_batch_norms
from gpunet.passes.common_subexpressions import merge_common_subexpressions
from gpunet.passes.constants import fold_constants
from gpunet.passes.dead_code import remove_dead_code
from gpunet.passes.epilogues import fuse_epilogues
from gpunet.passes.fusion import fuse
from gpunet.passes.layout import choose_layouts
from gpunet.passes.placement import insert_copies, place
from gpunet.passes.recomputation import recompute
from gpunet.passes.sharing import share_in_place
from gpunet.passes.updates import fuse_updates


@dataclass(frozen=True)
class PassContext:
    """What passes may know beside the graph.

    Attributes:
        home: the workspace's device.
        strict: whether falling back to the CPU is an error.
        kept: whether a blob must hold its value after the run. Passes may drop, merge or rename only what is
            not kept.
        recompute: number of segments whose activations are computed again (0 chooses); ``None`` for none.
    """

    home: Device
    strict: bool
    kept: Callable[[str], bool]
    recompute: int | None = None


@dataclass(frozen=True)
class Pass:
    """A step of the pipeline. Only optional ones can be switched off."""

    name: str
    function: Callable[[Graph, PassContext], Graph]
    optional: bool = True


def _recompute(graph: Graph, context: PassContext) -> Graph:
    return graph if context.recompute is None else recompute(graph, context.kept, context.recompute)


PASSES: Final[list[Pass]] = [
    Pass("dead_code", lambda graph, context: remove_dead_code(graph, context.kept)),
    Pass("common_subexpressions", lambda graph, context: merge_common_subexpressions(graph, context.kept)),
    Pass("batch_norm_folding", lambda graph, context: fold_batch_norms(graph, context.kept)),
    Pass("constants", lambda graph, context: fold_constants(graph, context.kept)),
    Pass("recomputation", _recompute),
    Pass(
        "placement", lambda graph, context: place(graph, context.home, strict=context.strict), optional=False
    ),
    Pass("copies", lambda graph, context: insert_copies(graph), optional=False),
    Pass("epilogues", lambda graph, context: fuse_epilogues(graph, context.kept)),
    Pass("layout", lambda graph, context: choose_layouts(graph, context.kept)),
    Pass("updates", lambda graph, context: fuse_updates(graph, context.kept)),
    Pass("fusion", lambda graph, context: fuse(graph, context.kept)),
    Pass("in_place", lambda graph, context: share_in_place(graph, context.kept)),
]
#: What is made behind the passes, by the program, and can be switched off like one. Without a schedule, each
#: device has one lane.
MEMORY_PLAN: Final = "memory_plan"


def check_names(without: frozenset[str]) -> None:
    """Raises :class:`NetError` for a name that is no optional pass."""
    known = [*(p.name for p in PASSES if p.optional), SCHEDULE, MEMORY_PLAN]
    unknown = sorted(without.difference(known))
    if unknown:
        raise NetError(f"cannot switch off pass {unknown[0]!r}, wanted one of {', '.join(known)}")


def run_passes(
    graph: Graph,
    context: PassContext,
    without: frozenset[str] = frozenset(),
    seen: Callable[[str, Graph], None] | None = None,
) -> Graph:
    """Runs all passes in order; ``seen`` is called with the name of each and the graph after it."""
    for step in PASSES:
        if step.name not in without:
            graph = step.function(graph, context)
            if seen is not None:
                seen(step.name, graph)
    return graph

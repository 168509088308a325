"""The engine ``graph``: GPU work is captured once as a CUDA graph and replayed with one launch.

Steps are ordered so that host work which needs nothing from the GPU comes first (counters, learning rates,
and the copies of their results); the GPU work in between is captured, with its side streams as fork and join.
The first run of a binding is not captured: it compiles kernels and makes plans. Values that change from step
to step (learning rate, number of the run) are read by kernels from device memory, which copies outside of the
graph fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpunet.backends import Event, Stream, backend
from gpunet.devices import CPU
from gpunet.engines import Step, StepFailed
from gpunet.graph import Node


def phases(nodes: Sequence[Node], needed: Sequence[set[int]]) -> list[int]:
    """For each node a number that grows with every change between host and device on the way to it.

    Host work has even numbers, GPU kernels odd ones. Nodes of one number need no others but those of smaller
    numbers and of their own.
    """
    result: list[int] = []
    for index, node in enumerate(nodes):
        captured = is_captured(node)
        phase = 1 if captured else 0
        for earlier in needed[index]:
            same = captured == is_captured(nodes[earlier])
            phase = max(phase, result[earlier] + (not same))
        result.append(phase)
    return result


def is_captured(node: Node) -> bool:
    """Whether the node is GPU work that a graph can hold: a kernel, and no copy from or to the host."""
    return node.op is not None and node.device != CPU


def by_phase(nodes: Sequence[Node], needed: Sequence[set[int]]) -> list[Node]:
    """The nodes in an order in which each phase comes as a whole."""
    numbers = phases(nodes, needed)
    return [nodes[i] for i in sorted(range(len(nodes)), key=lambda i: (numbers[i], i))]


class GraphRunner:
    """Runs steps; those of a device that follow one another are one graph each.

    Attributes:
        replays: number of graph launches so far.
        captures: whether graphs are made; if not, all steps are issued one by one in every run.
    """

    def __init__(self, steps: Sequence[Step], *, captures: bool = True) -> None:
        self.replays = 0
        self.captures = captures
        self._chunks = [_Chunk(self, part) for part in _cut(steps)]

    def __call__(self) -> None:
        """Runs all steps; raises :class:`StepFailed`."""
        for chunk in self._chunks:
            chunk.run()


def _cut(steps: Sequence[Step]) -> list[list[tuple[int, Step]]]:
    parts: list[list[tuple[int, Step]]] = []
    last: object = None
    for position, step in enumerate(steps):
        kind = step.lane.device if is_captured(step.node) else None
        if not parts or kind != last:
            parts.append([])
        parts[-1].append((position, step))
        last = kind
    return parts


class _Chunk:
    """Steps between two changes of side: host work, or GPU work that becomes a graph."""

    def __init__(self, runner: GraphRunner, steps: list[tuple[int, Step]]) -> None:
        self._runner = runner
        self._steps = steps
        first = steps[0][1]
        self._device = backend(first.lane.device) if is_captured(first.node) else None
        self._signalled = {w for _, step in steps for w in step.waits}
        self._runs = 0
        self._replay: Callable[[], None] | None = None

    def run(self) -> None:
        if self._device is None:
            for _, step in self._steps:
                _call(step)
            return
        if self._replay is None:
            # The first run is not captured: kernels are compiled and plans are made in it.
            if self._runs and self._runner.captures:
                self._replay = self._device.capture(self._issue, self._device.stream)
            else:
                self._issue()
            self._runs += 1
        if self._replay is not None:
            self._replay()
            self._runner.replays += 1

    def _issue(self) -> None:
        """Puts the steps on their streams, as a fork from the main stream and a join to it."""
        if self._device is None:
            return
        main = self._device.stream
        sides: dict[int, Stream] = {
            id(s.stream): s.stream for _, s in self._steps if s.stream not in (None, main)
        }
        events: dict[int, Event] = {}
        for side in sides.values():
            side.wait(main.record())
        try:
            for position, step in self._steps:
                stream = step.stream or main
                for earlier in step.waits:
                    if earlier in events:
                        stream.wait(events[earlier])
                _call(step)
                if position in self._signalled:
                    events[position] = stream.record()
        finally:
            # Also after an error: what the main stream is given next comes after what was issued here.
            for side in sides.values():
                main.wait(side.record())


def _call(step: Step) -> None:
    try:
        step.function(*step.arguments)
    except Exception as error:
        raise StepFailed(error, step.node) from error


def run_graph(steps: Sequence[Step]) -> GraphRunner:
    """The runner of the engine ``graph`` for bound steps."""
    return GraphRunner(steps)


def run_live(steps: Sequence[Step]) -> GraphRunner:
    """The runner of the engine ``graph`` for steps that cannot be captured: in the same order, on the same
    streams.
    """
    return GraphRunner(steps, captures=False)

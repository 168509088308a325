"""Which values share memory, and in what order nodes must run because of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpunet.devices import Device
from gpunet.graph import Graph, Node, Value


@dataclass(eq=False)
class Storage:
    """A place for one or several values of a segment.

    Attributes:
        device: whose memory.
        blob: the blob that owns the place and keeps it after a run; empty for values that nothing outside
            sees.
        nbytes: what holds all values.
        constant: whether it holds a constant, which is computed once and stays.
        values: all values that live here, in the order in which they are written.
        starts: where a value begins in it, in bytes, if not at its start.
    """

    device: Device
    blob: str = ""
    nbytes: int = 0
    constant: bool = False
    values: list[Value] = field(default_factory=list)
    starts: dict[Value, int] = field(default_factory=dict)

    @property
    def internal(self) -> bool:
        """Whether the place may be given to other values when its own are no longer needed."""
        return not self.blob and not self.constant

    def extent(self, value: Value) -> tuple[int, int]:
        """Where a value begins and ends in it, in bytes; all of it for a blob, and for what has no bytes."""
        if self.blob or not value.nbytes:
            return 0, max(self.nbytes, 1)
        start = self.starts.get(value, 0)
        return start, start + value.nbytes


def assign(graph: Graph, kept: Callable[[str], bool]) -> dict[Value, Storage]:
    """A storage for each value.

    Entries, and values of blobs that are ``kept``, live in their blob; an output that is written in place,
    and a view, where its input lives; an input that a later node holds where the output of that will live;
    each other value in an internal storage of its own.
    """
    places: dict[Value, Storage] = {}
    homes = _homes(graph.nodes)
    wholes = {whole: Storage(whole.device) for whole, _ in homes.values()}
    blobs: dict[tuple[str, Device], Storage] = {}

    def blob(value: Value) -> Storage:
        key = (value.name, value.device)
        return blobs.setdefault(key, Storage(value.device, value.name))

    for value in graph.entries:
        _put(places, value, blob(value))
    for node in graph.nodes:
        for index, value in enumerate(node.outputs):
            source = node.aliased(index)
            if source is not None:
                start = places[source].starts.get(source, 0) + node.offsets.get(index, 0)
                _put(places, value, places[source], start)
            elif value in homes:
                whole, start = homes[value]
                _put(places, value, wholes[whole], start)
            elif value in wholes:
                _put(places, value, wholes[value])
            elif kept(value.name):
                _put(places, value, blob(value))
            else:
                _put(places, value, Storage(value.device, constant=node.constant))
    return places


def _put(places: dict[Value, Storage], value: Value, storage: Storage, start: int = 0) -> None:
    places[value] = storage
    storage.values.append(value)
    if start:
        storage.starts[value] = start
    storage.nbytes = max(storage.nbytes, start + value.nbytes)


def _homes(nodes: Sequence[Node]) -> dict[Value, tuple[Value, int]]:
    """The values that are written into the output of a later node, that output, and where in it."""
    held = {node.inputs[i]: (node.outputs[0], start) for node in nodes for i, start in node.holds.items()}
    if not held:
        return {}
    # What is held may have been written in place of something; all of that moves.
    firsts: dict[Value, Value] = {}
    for node in nodes:
        for index, value in enumerate(node.outputs):
            source = node.aliased(index)
            firsts[value] = value if source is None else firsts.get(source, source)
    return {firsts[value]: home for value, home in held.items()}


@dataclass(eq=False)
class _Uses:
    """Which nodes have written and read the bytes of a storage: (start, stop, node)."""

    writers: list[tuple[int, int, int]] = field(default_factory=list)
    readers: list[tuple[int, int, int]] = field(default_factory=list)

    def wrote(self, extent: tuple[int, int]) -> list[int]:
        """Nodes that wrote what is there."""
        return [node for start, stop, node in self.writers if start < extent[1] and extent[0] < stop]

    def touched(self, extent: tuple[int, int]) -> list[int]:
        """Nodes that wrote it, or have read it since."""
        both = (*self.writers, *self.readers)
        return [node for start, stop, node in both if start < extent[1] and extent[0] < stop]

    def write(self, extent: tuple[int, int], node: int) -> None:
        """Whatever was known of those bytes is over."""
        first, end = extent
        self.writers = [use for use in self.writers if use[0] < first or use[1] > end]
        self.readers = [use for use in self.readers if use[0] < first or use[1] > end]
        self.writers.append((first, end, node))


def dependencies(nodes: Sequence[Node], places: dict[Value, Storage]) -> list[set[int]]:
    """For each node the earlier nodes that it must run after: those that wrote what it reads, and those that
    read or wrote what it overwrites, byte by byte. Positions are those in ``nodes``.
    """
    uses: defaultdict[Storage, _Uses] = defaultdict(_Uses)
    chains: dict[str, int] = {}
    result: list[set[int]] = []
    for index, node in enumerate(nodes):
        needed: set[int] = set()
        reads = [(uses[places[value]], places[value].extent(value)) for value in node.inputs]
        writes = [(uses[places[value]], places[value].extent(value)) for value in node.outputs]
        for use, extent in reads:
            needed.update(use.wrote(extent))
        for value in node.after:
            if value in places:
                needed.update(uses[places[value]].wrote(places[value].extent(value)))
        chain = "" if node.op is None else node.op.schema.chain
        if chain:
            if chain in chains:
                needed.add(chains[chain])
            chains[chain] = index
        for use, extent in writes:
            needed.update(use.touched(extent))
        needed.discard(index)
        result.append(needed)
        for use, extent in reads:
            use.readers.append((*extent, index))
        for use, extent in writes:
            use.write(extent, index)
    return result

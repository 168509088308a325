"""Which values share memory, and in what order nodes must run because of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpunet.devices import Device
from gpunet.graph import Graph, Node, Value
from gpunet.specs import TensorSpec


@dataclass(eq=False)
class Storage:
    """A place for one or several values of a segment.

    Attributes:
        device: whose memory.
        blob: the blob that owns the place and keeps it after a run; empty for values that nothing outside
            sees.
        nbytes: size of the largest value.
        constant: whether it holds a constant, which is computed once and stays.
        values: all values that live here, in the order in which they are written.
    """

    device: Device
    blob: str = ""
    nbytes: int = 0
    constant: bool = False
    values: list[Value] = field(default_factory=list)

    @property
    def internal(self) -> bool:
        """Whether the place may be given to other values when its own are no longer needed."""
        return not self.blob and not self.constant


def assign(graph: Graph, kept: Callable[[str], bool]) -> dict[Value, Storage]:
    """A storage for each value.

    Entries, and values of blobs that are ``kept``, live in their blob; an output that is written in place,
    and a view, where its input lives; each other value in an internal storage of its own.
    """
    places: dict[Value, Storage] = {}
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
                _put(places, value, places[source])
            elif kept(value.name):
                _put(places, value, blob(value))
            else:
                _put(places, value, Storage(value.device, constant=node.constant))
    return places


def _put(places: dict[Value, Storage], value: Value, storage: Storage) -> None:
    places[value] = storage
    storage.values.append(value)
    if isinstance(value.spec, TensorSpec):
        storage.nbytes = max(storage.nbytes, value.spec.nbytes)


def dependencies(nodes: Sequence[Node], places: dict[Value, Storage]) -> list[set[int]]:
    """For each node the earlier nodes that it must run after: those that wrote what it reads, and those that
    read or wrote what it overwrites. Positions are those in ``nodes``.
    """
    writer: dict[Storage, int] = {}
    readers: dict[Storage, list[int]] = {}
    chains: dict[str, int] = {}
    result: list[set[int]] = []
    for index, node in enumerate(nodes):
        needed: set[int] = set()
        for value in node.inputs:
            storage = places[value]
            if storage in writer:
                needed.add(writer[storage])
        needed.update(writer[places[value]] for value in node.after if places.get(value) in writer)
        chain = "" if node.op is None else node.op.schema.chain
        if chain:
            if chain in chains:
                needed.add(chains[chain])
            chains[chain] = index
        for value in node.outputs:
            storage = places[value]
            needed.update(readers.get(storage, ()))
            if storage in writer:
                needed.add(writer[storage])
        needed.discard(index)
        result.append(needed)
        for value in node.inputs:
            readers.setdefault(places[value], []).append(index)
        for value in node.outputs:
            writer[places[value]] = index
            readers[places[value]] = []
    return result

"""Where values are written and read: what a pass asks before it puts one node in place of several."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from gpunet.devices import Device
from gpunet.graph import Graph, Node, Value
from gpunet.kernels import find, reason_against
from gpunet.operator import Operator
from gpunet.proto import OperatorDef


class Uses:
    """Writers and readers of the values of a graph, by position in its list of nodes.

    Args:
        graph: its nodes may be replaced afterwards, as long as their positions stay.
        kept: whether a blob must hold its value after the run.
    """

    def __init__(self, graph: Graph, kept: Callable[[str], bool]) -> None:
        self._graph = graph
        self._kept = kept
        self._awaited = {value for node in graph.nodes for value in node.after}
        self._writes: dict[tuple[str, Device], list[int]] = {}
        #: The position of the node that writes a value; entries have none.
        self.writer: dict[Value, int] = {}
        #: Positions of the nodes that read a value, in order.
        self.readers: dict[Value, list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for value in node.inputs:
                self.readers.setdefault(value, []).append(position)
            for value in node.outputs:
                self.writer[value] = position
                self._writes.setdefault((value.name, value.device), []).append(position)

    def droppable(self, value: Value) -> bool:
        """Whether a value need not be stored where its readers get along without it: nothing waits for it,
        and it is not what a blob must hold after the run.
        """
        # What a blob holds before it is written again need not be stored, even if its last value is kept.
        visible = self._kept(value.name) and value in self._graph.finals.get(value.name, ())
        return not visible and value not in self._awaited

    def writes_between(self, value: Value, first: int, last: int) -> Sequence[int]:
        """Positions behind ``first`` and before ``last`` where the blob of a value is written, on its device.

        With none, a node at ``last`` can read what one at ``first`` reads.
        """
        writes = self._writes.get((value.name, value.device), [])
        return writes[bisect_right(writes, first) : bisect_left(writes, last)]


def is_plain(node: Node) -> bool:
    """Whether the default kernel runs the operator, in every run, as soon as its inputs are there."""
    return node.op is not None and not node.constant and not node.after and not node.op.definition.engine


def merged_node(definition: OperatorDef, values: Sequence[Value], last: Node) -> Node | None:
    """The node that reads ``values`` and gives what ``last`` gave, in its place.

    Returns:
        ``None`` where outputs would be of another shape or type, or the device has no kernel for it.
    """
    if last.op is None:
        return None
    op = Operator(definition, last.op.net_name, last.op.index)
    inputs, outputs = [value.spec for value in values], [value.spec for value in last.outputs]
    kind = last.device.kind
    if op.infer(inputs) != outputs or reason_against(op, kind, inputs, outputs) is not None:
        return None
    kernel = find(op, kind, inputs, outputs)
    return Node(op, tuple(values), last.outputs, last.index, last.device, kernel)


def with_nodes(graph: Graph, nodes: Sequence[Node | None]) -> Graph:
    """The graph with other nodes; ``None`` stands for one that is left out."""
    left = [node for node in nodes if node is not None]
    made = {value for node in left for value in node.outputs}
    # A blob that is written, but not stored any more, has no value at the end.
    finals = {name: [v for v in values if v in made] for name, values in graph.finals.items()}
    return Graph(left, graph.entries, finals)

"""Recomputation: activations of the forward pass are not kept for the backward pass but computed once more.

The forward operators are cut into segments of about equal memory, at places where little is handed on. What
crosses a cut is kept; the rest of a segment is computed again, from what is kept, right before the first
gradient operator that reads any of it. Batch norms take the statistics that they have saved, by another
formula, so their outputs may differ in the last bits: gradients that compare elements (of a maximum) read all
of them from one computation. Random operators draw the same numbers again, since a draw depends on
the operator and the step alone. Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, Training Deep Nets with
Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpunet.graph import Graph, Node, Value, overwritten
from gpunet.operator import Operator
from gpunet.proto import OperatorDef

#: Suffix of blobs that are computed again.
AGAIN = "/again"


def recompute(graph: Graph, kept: Callable[[str], bool], segments: int = 0) -> Graph:
    """Inserts copies of forward nodes in front of the gradient nodes that read their outputs.

    Args:
        graph: forward nodes, then gradient nodes (``is_gradient_op`` tells), as a model's net has them.
        kept: whether a blob is visible after the run; such values stay as they are.
        segments: number of segments; 0 chooses about the square root of the number of forward nodes.

    Returns:
        A new graph; the same one where there are no gradients.
    """
    gradients = (i for i, n in enumerate(graph.nodes) if n.op is not None and n.op.definition.is_gradient_op)
    start = next(gradients, 0)
    if start < 2:
        return graph
    forward, backward = graph.nodes[:start], graph.nodes[start:]
    home = _segment_of(forward, segments or max(2, math.isqrt(start)))
    plan = _Plan(forward, backward, home, kept)
    nodes = list(forward)
    for node in backward:
        nodes.extend(plan.before(node))
        node.inputs = tuple(plan.replaced.get(value, value) for value in node.inputs)
        nodes.append(node)
        plan.written.update(value.name for value in node.outputs)
    return Graph(nodes, graph.entries, graph.finals)


def _segment_of(forward: Sequence[Node], count: int) -> dict[Node, int]:
    """The number of the segment of each node: cuts at places where few bytes are handed on, near equal shares
    of memory.
    """
    last = {value: index for index, node in enumerate(forward) for value in node.inputs}
    crossing = [0] * len(forward)
    position = {value: index for index, node in enumerate(forward) for value in node.outputs}
    for index, node in enumerate(forward):
        for value in node.outputs:
            for place in range(index, last.get(value, index)):
                crossing[place] += value.nbytes
        for o in range(len(node.outputs)):
            source = node.aliased(o)
            if source in position:
                # What is overwritten cannot be kept: no cut between an operator and one that works in its
                # place.
                for place in range(position[source], index):
                    crossing[place] += 1 << 60
    made = 0
    total = sum(v.nbytes for node in forward for v in node.outputs) or 1
    shares = []
    for node in forward:
        made += sum(v.nbytes for v in node.outputs)
        shares.append(made / total)
    cuts = set()
    for number in range(1, count):
        near = [i for i, share in enumerate(shares) if abs(share - number / count) <= 0.5 / count]
        if near:
            cuts.add(min(near, key=lambda i: (crossing[i], abs(shares[i] - number / count))))
    segment, result = 0, {}
    for index, node in enumerate(forward):
        result[node] = segment
        segment += index in cuts
    return result


class _Plan:
    """What is computed again, and when."""

    def __init__(
        self,
        forward: Sequence[Node],
        backward: Sequence[Node],
        home: dict[Node, int],
        kept: Callable[[str], bool],
    ) -> None:
        #: Values of the forward pass, and those that take their place in the backward pass.
        self.replaced: dict[Value, Value] = {}
        self._home = home
        self._writer = {value: node for node in forward for value in node.outputs}
        self._order = {node: index for index, node in enumerate(forward)}
        self._kept = kept
        #: Blobs that the backward pass has written so far.
        self.written: set[str] = set()
        self._overwritten = overwritten(forward)
        handed_on = {
            value
            for node in forward
            for value in node.inputs
            if value in self._writer and home[self._writer[value]] != home[node]
        }
        final = max(home.values())
        wanted: dict[int, list[Value]] = {}
        for node in backward:
            for value in node.inputs:
                writer = self._writer.get(value)
                # What the last segment made has just been made when the backward pass begins.
                if (
                    writer is not None
                    and home[writer] != final
                    and value not in handed_on
                    and not kept(value.name)
                ):
                    wanted.setdefault(home[writer], []).append(value)
        self._want_what_is_compared(backward, wanted)
        self._stays = handed_on
        self._wanted = wanted
        self._done: set[int] = set()

    def _want_what_is_compared(self, backward: Sequence[Node], wanted: dict[int, list[Value]]) -> None:
        """Adds what gradients compare with values that are wanted, although it is kept."""
        for node in backward:
            if node.op is None or not node.op.schema.compares:
                continue
            written = {
                value: self._home[self._writer[value]] for value in node.inputs if value in self._writer
            }
            again = {home for value, home in written.items() if value in wanted.get(home, ())}
            for value, home in written.items():
                if home in again and value not in wanted[home]:
                    wanted[home].append(value)

    def before(self, node: Node) -> list[Node]:
        """The nodes to compute in front of a gradient node."""
        made = []
        for value in node.inputs:
            writer = self._writer.get(value)
            segment = None if writer is None else self._home[writer]
            if segment in self._wanted and segment not in self._done and value in self._wanted[segment]:
                self._done.add(segment)
                made.extend(self._again(segment))
        return made

    def _again(self, segment: int) -> list[Node]:
        """Copies of the nodes that a segment's wanted values need; none where they cannot be computed
        again.
        """
        needed: set[Node] = set()
        pending = [self._writer[value] for value in self._wanted[segment]]
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            if not self._repeatable(node):
                return []
            needed.add(node)
            for value in node.inputs:
                writer = self._writer.get(value)
                if writer is not None and self._home[writer] == segment and value not in self._stays:
                    pending.append(writer)
                elif value in self._overwritten and (writer is not None or not _updates_statistics(node.op)):
                    return []
        return [self._copy(node) for node in sorted(needed, key=self._order.__getitem__)]

    def _repeatable(self, node: Node) -> bool:
        op = node.op
        if op is None or op.dynamic or op.schema.host or op.schema.chain:
            return False
        if _updates_statistics(op):
            read: Sequence[Value] = node.inputs[:3]
            return len(node.inputs) == 5 and not any(v.entry and v.name in self.written for v in read)
        visible = any(self._kept(value.name) for value in node.outputs)
        # A parameter that has been updated meanwhile would give other values.
        return not visible and not any(v.entry and v.name in self.written for v in node.inputs)

    def _copy(self, node: Node) -> Node:
        op = node.op
        if op is None:
            raise TypeError("only operators are computed again")
        definition = _test_norm(op) if _updates_statistics(op) else None
        inputs = tuple(self.replaced.get(value, value) for value in node.inputs[:3])
        if definition is not None:
            # With the statistics that the forward pass saved; the running ones are not updated a second time.
            inputs = (*inputs, node.outputs[3], node.outputs[4])
            outputs = node.outputs[:1]
        else:
            definition = OperatorDef()
            definition.CopyFrom(op.definition)
            inputs = tuple(self.replaced.get(value, value) for value in node.inputs)
            outputs = node.outputs
        made = []
        for value in outputs:
            source = next((i for i, v in enumerate(node.inputs) if v.name == value.name), None)
            # Written in place of an input: of the one that stands in for it now.
            name = inputs[source].name if source is not None and source < len(inputs) else value.name + AGAIN
            made.append(Value(name, value.spec))
        del definition.input[:], definition.output[:]
        definition.input.extend(value.name for value in inputs)
        definition.output.extend(value.name for value in made)
        self.replaced.update(zip(outputs, made, strict=True))
        return Node(Operator(definition, op.net_name, op.index), inputs, tuple(made), node.index)


def _updates_statistics(op: Operator | None) -> bool:
    return op is not None and op.type == "SpatialBN" and not op.args.is_test


def _test_norm(op: Operator) -> OperatorDef:
    definition = OperatorDef()
    definition.CopyFrom(op.definition)
    kept = [arg for arg in definition.arg if arg.name not in ("is_test", "inverted")]
    del definition.arg[:]
    definition.arg.extend(kept)
    definition.arg.add(name="is_test", i=1)
    definition.arg.add(name="inverted", i=1)
    return definition

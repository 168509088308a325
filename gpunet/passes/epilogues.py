"""Epilogues: a convolution takes over what is done to its output, so that it is written once.

``Conv [+ Sum or Add of a tensor of the same shape] [+ Relu]`` and ``Conv + Sigmoid`` become FusedConv,
``FC + Relu`` FusedFC. (A sum is rounded to its type before a sigmoid, which a kernel in one pass would not
do; a ReLU of it is the same either way.) What is in between is read by the next operator alone and not kept;
the gradient of a ReLU reads its output, so the forward part of a training net qualifies too. The new operator
runs where the last of them ran: what it reads must not be overwritten before. Later convolutions choose
first: of two that are added up, the one that runs just before the sum takes it.

On the CPU a part of the output is finished while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpunet.graph import Graph, Node, Value
from gpunet.kernels import find, reason_against
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec

#: What becomes of each operator with an epilogue, and the words that it takes.
_FUSED: Final = {
    **dict.fromkeys(CONVOLUTIONS, ("FusedConv", ("add", "relu", "sigmoid"))),
    "FC": ("FusedFC", ("relu",)),
    "FCTransposed": ("FusedFCTransposed", ("relu",)),
}
_WORDS: Final = {"Sum": "add", "Add": "add", "Relu": "relu", "Sigmoid": "sigmoid"}


@dataclass(eq=False)
class _Chain:
    """An operator and those that follow it.

    Attributes:
        nodes: by position, in order.
        inputs: what it reads from outside, each with the position of the reader.
        words: of the epilogue.
    """

    nodes: dict[int, Node]
    inputs: list[tuple[Value, int]]
    words: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Position of the last node."""
        return max(self.nodes)

    @property
    def output(self) -> Value:
        """What the last node gives."""
        return self.nodes[self.last].outputs[0]

    def longer(self, position: int, node: Node, word: str, operands: Sequence[Value]) -> _Chain:
        """The chain with another node."""
        added = [(value, position) for value in operands]
        return _Chain(self.nodes | {position: node}, self.inputs + added, [*self.words, word])


def fuse_epilogues(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Replaces convolutions and products with what follows them by one operator each."""
    return _Epilogues(graph, kept).run()


class _Epilogues:
    def __init__(self, graph: Graph, kept: Callable[[str], bool]) -> None:
        self._graph = graph
        self._kept = kept
        self._nodes: list[Node | None] = list(graph.nodes)
        self._readers: dict[Value, list[int]] = {}
        #: Values that others wait for without reading them.
        self._awaited = {value for node in graph.nodes for value in node.after}
        #: Where each blob is written, by name and device.
        self._writes: dict[tuple[str, Any], list[int]] = {}
        for position, node in enumerate(graph.nodes):
            for value in node.inputs:
                self._readers.setdefault(value, []).append(position)
            for value in node.outputs:
                self._writes.setdefault((value.name, value.device), []).append(position)

    def run(self) -> Graph:
        for position in reversed(range(len(self._nodes))):
            node = self._nodes[position]
            if node is None or node.op is None or node.op.type not in _FUSED or not _plain(node):
                continue
            for chain in reversed(list(self._chains(position, node))):
                fused = self._fused(chain) if self._holds(chain) else None
                if fused is not None:
                    for member in chain.nodes:
                        self._nodes[member] = None
                    self._nodes[chain.last] = fused
                    break
        left = [node for node in self._nodes if node is not None]
        made = {value for node in left for value in node.outputs}
        # A blob that is written, but not stored any more, has no value at the end.
        finals = {name: [v for v in values if v in made] for name, values in self._graph.finals.items()}
        return Graph(left, self._graph.entries, finals)

    def _chains(self, position: int, node: Node) -> Iterator[_Chain]:
        """The operator at a position with what follows it, shorter chains first."""
        allowed = _FUSED[node.op.type][1] if node.op is not None else ()
        chain = _Chain({position: node}, [(value, position) for value in node.inputs])
        while not chain.words or chain.words[-1] == "add":
            value = chain.output
            readers = self._readers.get(value, ())
            if len(readers) != 1 or value in self._awaited or self._visible(value):
                return
            follower = self._nodes[readers[0]]
            word = "" if follower is None or follower.op is None else _WORDS.get(follower.op.type, "")
            if follower is None or word not in allowed or (word in ("add", "sigmoid") and chain.words):
                return
            if not _plain(follower) or follower.device != node.device:
                return
            operands = [other for other in follower.inputs if other is not value]
            if len(operands) != (word == "add") or any(v.spec != value.spec for v in operands):
                return
            chain = chain.longer(readers[0], follower, word, operands)
            yield chain

    def _visible(self, value: Value) -> bool:
        # What a blob holds before it is written again need not be stored, even if its last value is kept.
        return self._kept(value.name) and value in self._graph.finals.get(value.name, ())

    def _holds(self, chain: _Chain) -> bool:
        """Whether all that the chain reads still holds when its last node runs, and lies elsewhere than what
        it writes: a convolution writes before it has read all.
        """
        for value, reader in chain.inputs:
            writes = self._writes.get((value.name, value.device), [])
            if any(reader <= w < chain.last and w not in chain.nodes for w in writes):
                return False
            # A member that is left out does not overwrite what it was to write.
            if value.name == chain.output.name:
                return False
        return True

    def _fused(self, chain: _Chain) -> Node | None:
        """The node that does the work of a chain; ``None`` where its device has no kernel for it."""
        first, last = chain.nodes[min(chain.nodes)], chain.nodes[chain.last]
        if first.op is None or last.op is None:
            return None
        definition = OperatorDef()
        definition.CopyFrom(first.op.definition)
        definition.type = _FUSED[first.op.type][0]
        del definition.input[:], definition.output[:], definition.arg[:]
        definition.arg.extend(a for a in first.op.definition.arg if a.name != "no_gradient_to_input")
        words = chain.words
        if definition.type == "FusedConv" and len(first.inputs) > 2:
            words = ["bias", *words]
        definition.arg.add(name="epilogue", s="+".join(words).encode())
        values = tuple(value for value, _ in chain.inputs)
        definition.input.extend(value.name for value in values)
        definition.output.append(chain.output.name)
        op = Operator(definition, last.op.net_name, last.op.index)
        specs = [value.spec for value in values], [chain.output.spec]
        kind = first.device.kind
        if op.infer(specs[0]) != specs[1] or reason_against(op, kind, *specs) is not None:
            return None
        kernel = find(op, kind, *specs)
        return Node(op, values, last.outputs, last.index, first.device, kernel)


def _plain(node: Node) -> bool:
    """Whether the default kernel runs the operator, in every run, on tensors of floats."""
    op = node.op
    return (
        op is not None
        and not node.constant
        and not node.after
        and not op.definition.engine
        and len(node.outputs) == 1
        and isinstance(node.outputs[0].spec, TensorSpec)
    )

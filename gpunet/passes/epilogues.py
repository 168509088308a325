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
from typing import Final

from gpunet.graph import Graph, Node, Value
from gpunet.operators.convolution import CONVOLUTIONS
from gpunet.passes.uses import Uses, is_plain, merged_node, with_nodes
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
        self._uses = Uses(graph, kept)
        self._nodes: list[Node | None] = list(graph.nodes)

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
        return with_nodes(self._graph, self._nodes)

    def _chains(self, position: int, node: Node) -> Iterator[_Chain]:
        """The operator at a position with what follows it, shorter chains first."""
        allowed = _FUSED[node.op.type][1] if node.op is not None else ()
        chain = _Chain({position: node}, [(value, position) for value in node.inputs])
        while not chain.words or chain.words[-1] == "add":
            value = chain.output
            readers = self._uses.readers.get(value, ())
            if len(readers) != 1 or not self._uses.droppable(value):
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

    def _holds(self, chain: _Chain) -> bool:
        """Whether all that the chain reads still holds when its last node runs, and lies elsewhere than what
        it writes: a convolution writes before it has read all.
        """
        for value, reader in chain.inputs:
            if any(w not in chain.nodes for w in self._uses.writes_between(value, reader, chain.last)):
                return False
            # A member that is left out does not overwrite what it was to write.
            if value.name == chain.output.name:
                return False
        return True

    def _fused(self, chain: _Chain) -> Node | None:
        """The node that does the work of a chain; ``None`` where its device has no kernel for it."""
        first, last = chain.nodes[min(chain.nodes)], chain.nodes[chain.last]
        if first.op is None:
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
        return merged_node(definition, values, last)


def _plain(node: Node) -> bool:
    """Whether the default kernel runs the operator, in every run, and gives one tensor."""
    return is_plain(node) and len(node.outputs) == 1 and isinstance(node.outputs[0].spec, TensorSpec)

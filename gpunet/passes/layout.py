"""Layout: on GPUs, convolutions in half precision run with channels innermost, and what is between them too.

Tensor cores read channels that are neighbours. Of images with channels first, cuDNN transposes what a
convolution reads and writes, each time. The pass turns whole regions of operators to ``order`` NHWC and puts
transposes (NCHW2NHWC, NHWC2NCHW) at their borders only; what a blob is, from outside, does not change.

The rule. A transpose reads and writes every byte of a tensor. A region is worth its borders if cuDNN's own
transposes in its convolutions would move at least :data:`MARGIN` times the bytes that those at the borders
do: a convolution by itself is not. With channels first a FusedConv that adds a tensor, or has an
activation without bias, also costs a pass of our own.
Filters that do not change are transposed once, which costs nothing; filters in training are transposed in
every step, and their gradients back. Regions start as large as they can be and shrink while that saves bytes.

Which types: float16 and bfloat16; float32 where TF32 is allowed (``GPUNET_TF32``), since without it no tensor
core is used and nothing is gained. Blobs that are kept stay as they are, so with all blobs kept the pass does
nothing. On the CPU it does nothing either: NumPy's kernels are made for channels first (by rows,
by Winograd's tiles), and there are no tensor cores.

Left alone: Dropout (which elements it drops depends on their places in memory), Reshape, FC and all else
whose schema does not tell where its channels are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpunet.definitions import make_operator
from gpunet.devices import CPU
from gpunet.dtypes import is_half
from gpunet.errors import GpunetError
from gpunet.graph import Graph, Node, Value
from gpunet.kernels import find, reason_against
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS
from gpunet.operators.fused_convolution import words_of
from gpunet.passes.uses import with_nodes
from gpunet.proto import OperatorDef
from gpunet.schema import Places
from gpunet.specs import BlobSpec, TensorSpec

#: Suffix of the names of tensors with channels innermost.
SUFFIX: Final = "/nhwc"
#: How many times the bytes of its borders a region must save. With less than 2 single convolutions would be
#: turned too, where our transposes move as much as cuDNN's do; what networks of several layers become is the
#: same with 1 and with 2.
MARGIN: Final = 2

#: Convolutions and their gradients, which cuDNN runs with channels innermost whatever they are given.
_FORWARD: Final = (*CONVOLUTIONS, "ConvTranspose", "FusedConv")
_BACKWARD: Final = tuple(f"{type}Gradient" for type in _FORWARD[:-1])


def _laid_out(node: Node) -> Places | None:
    """Which inputs and outputs of a node have channels, filters included; ``None`` for other operators."""
    op = node.op
    if op is None or node.constant or getattr(op.args, "order", "NCHW") != "NCHW":
        return None
    every = tuple(range(len(node.inputs))), tuple(range(len(node.outputs)))
    along = op.schema.joins or op.schema.cuts
    if along is not None:
        first = node.inputs[0].spec
        if op.args.add_axis or not isinstance(first, TensorSpec) or along(op, first.rank) != 1:
            return None
        return (every[0], (0,)) if op.schema.joins else ((0,), every[1])
    if op.schema.is_elementwise(op):
        specs = [value.spec for value in (*node.inputs, *node.outputs)]
        shapes = {s.shape if isinstance(s, TensorSpec) else None for s in specs}
        return every if len(shapes) == 1 else None
    return op.schema.channel_places(op)


def _adds(op: Operator) -> bool:
    return op.type == "FusedConv" and "add" in words_of(op.args)


@dataclass(eq=False)
class _Turned:
    """A node as it is with channels innermost.

    Attributes:
        node: the node as it is.
        op: the operator in its place.
        places: positions of the inputs and outputs whose order changes.
        gain: bytes that need not be moved any more.
    """

    node: Node
    op: Operator
    places: Places
    gain: int

    @property
    def inputs(self) -> list[Value]:
        """The inputs whose order changes, each once."""
        return list(dict.fromkeys(self.node.inputs[i] for i in self.places[0]))

    @property
    def outputs(self) -> list[Value]:
        """The outputs whose order changes."""
        return [self.node.outputs[o] for o in self.places[1]]

    @property
    def values(self) -> list[Value]:
        """Both."""
        return [*self.inputs, *self.outputs]


def choose_layouts(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Turns regions of operators on GPUs to channels innermost where that saves transposes."""
    # Where everything is kept, tensors of our own would be too.
    if kept(SUFFIX) or all(node.device == CPU for node in graph.nodes):
        return graph
    return _Layouts(graph, kept).run()


class _Layouts:
    def __init__(self, graph: Graph, kept: Callable[[str], bool]) -> None:
        self._graph = graph
        self._written = {value.name for node in graph.nodes for value in node.outputs}
        self._constants = {value for node in graph.nodes if node.constant for value in node.outputs}
        self._writer = {value: node for node in graph.nodes for value in node.outputs}
        self._finals = {v for values in graph.finals.values() for v in values if kept(v.name)}
        self._filters: set[Value] = set()
        self._turned: dict[Node, _Turned] = {}
        #: Values that are wanted with channels first, whatever is chosen; and who reads the others.
        self._fixed: set[Value] = set(self._finals)
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            turned = _turned(node)
            if turned is not None:
                self._turned[node] = turned
                if turned.op.type in _FORWARD + _BACKWARD:
                    self._filters.add(node.inputs[1])
            laid = turned.places[0] if turned is not None else ()
            for index, value in enumerate(node.inputs):
                if index in laid:
                    self._readers.setdefault(value, []).append(node)
                else:
                    self._fixed.add(value)

    def run(self) -> Graph:
        region = self._region()
        if not region:
            return self._graph
        nodes = list(self._rewritten(region))
        read = {value for node in nodes for value in node.inputs}
        rewritten = with_nodes(self._graph, nodes)
        rewritten.entries = [value for value in rewritten.entries if value in read]
        return rewritten

    # Which operators are turned.

    def _region(self) -> set[Node]:
        region = set(self._turned)
        # What gains nothing by itself goes first: convolutions are judged by borders that are where they pay.
        while self._shrink(region, convolutions=False) or self._shrink(region, convolutions=True):
            pass
        for part in self._parts(region):
            if self._saved(region, part) > 0:
                region -= part
        return region

    def _shrink(self, region: set[Node], *, convolutions: bool) -> bool:
        """Takes operators out of a region one by one while that saves bytes; whether it took any."""
        before = len(region)
        for node in reversed(self._graph.nodes):
            if node in region and (self._turned[node].gain > 0) == convolutions:
                saved = self._saved(region, {node})
                # Of two ways that move as much, operators between stay as they are.
                if saved > 0 or (saved == 0 and not convolutions):
                    region.discard(node)
        return len(region) < before

    def _saved(self, region: set[Node], part: set[Node]) -> int:
        """What is gained if a part of a region keeps its order: bytes of our transposes, times their weight,
        less those that cuDNN moves then.
        """
        values = dict.fromkeys(v for node in part for v in self._turned[node].values)
        before = sum(self._moved(v, region) for v in values)
        rest = region - part
        after = sum(self._moved(v, rest) for v in values)
        return MARGIN * (before - after) - sum(self._turned[node].gain for node in part)

    def _moved(self, value: Value, region: set[Node]) -> int:
        """Bytes that transposes of a value move, if the operators of a region are turned."""
        readers = [node in region for node in self._readers.get(value, ())]
        if self._writer.get(value) in region:
            transposed = value in self._fixed or not all(readers)
        else:
            transposed = any(readers) and not self._is_constant(value)
        return 2 * value.nbytes if transposed else 0

    def _is_constant(self, value: Value) -> bool:
        """Whether a value is the same in every run: filters that nothing writes."""
        unchanged = value.entry and value.name not in self._written and value in self._filters
        return unchanged or value in self._constants

    def _parts(self, region: set[Node]) -> Iterator[set[Node]]:
        """The operators of a region that are connected by values, one part after another."""
        neighbours: dict[Value, list[Node]] = {}
        for node in region:
            for value in self._turned[node].values:
                neighbours.setdefault(value, []).append(node)
        left = set(region)
        for first in [node for node in self._graph.nodes if node in region]:
            part, pending = set(), [first]
            while pending:
                node = pending.pop()
                if node in left:
                    left.discard(node)
                    part.add(node)
                    pending += [n for value in self._turned[node].values for n in neighbours[value]]
            if part:
                yield part

    # What they become.

    def _rewritten(self, region: set[Node]) -> Iterator[Node]:
        twins: dict[Value, Value] = {}

        def twin(value: Value) -> Value:
            if value not in twins:
                twins[value] = Value(value.name + SUFFIX, _last(value.spec), value.device)
            return twins[value]

        for node in self._graph.nodes:
            # A tensor that exists with channels innermost only stands for the other.
            after = tuple(
                twins[v]
                if v in twins and self._writer.get(v) in region and not self._wanted(v, region)
                else v
                for v in node.after
            )
            if node not in region:
                node.after = after
                yield node
                continue
            turned = self._turned[node]
            for value in turned.inputs:
                if value not in twins:
                    made = twin(value)
                    yield _transpose("NCHW2NHWC", value, made, node, constant=self._is_constant(value))
            places = turned.places
            inputs = tuple(twins[v] if i in places[0] else v for i, v in enumerate(node.inputs))
            outputs = tuple(twin(v) if o in places[1] else v for o, v in enumerate(node.outputs))
            specs = [v.spec for v in inputs], [v.spec for v in outputs]
            kernel = find(turned.op, node.device.kind, *specs)
            yield Node(
                turned.op, inputs, outputs, node.index, node.device, kernel, constant=False, after=after
            )
            for value in turned.outputs:
                if self._wanted(value, region):
                    yield _transpose("NHWC2NCHW", twins[value], value, node)

    def _wanted(self, value: Value, region: set[Node]) -> bool:
        """Whether something needs a value of the region with channels first."""
        return value in self._fixed or any(node not in region for node in self._readers.get(value, ()))


def _last(spec: BlobSpec) -> TensorSpec:
    """The spec with channels innermost."""
    if not isinstance(spec, TensorSpec):
        raise TypeError("only tensors have channels")
    return spec.with_shape(spec.shape[0], *spec.shape[2:], spec.shape[1])


def _transpose(type: str, source: Value, target: Value, node: Node, *, constant: bool = False) -> Node:
    """The node that gives ``target``, on the device of ``node``."""
    name = "" if node.op is None else node.op.net_name
    op = Operator(make_operator(type, [source.name], [target.name]), name, node.index)
    kernel = find(op, node.device.kind, [source.spec], [target.spec])
    return Node(op, (source,), (target,), node.index, node.device, kernel, constant=constant)


def _turned(node: Node) -> _Turned | None:
    """The node with channels innermost; ``None`` where it does not exist or no kernel runs it."""
    places = None if node.device == CPU else _laid_out(node)
    if places is None or node.op is None:
        return None
    inputs: list[BlobSpec] = [value.spec for value in node.inputs]
    outputs: list[BlobSpec] = [value.spec for value in node.outputs]
    for specs, chosen in ((inputs, places[0]), (outputs, places[1])):
        for index in chosen:
            spec = specs[index]
            if not isinstance(spec, TensorSpec) or spec.rank < 3:
                return None
            specs[index] = _last(spec)
    try:
        op = Operator(_definition(node.op, places, len(_shape(node))), node.op.net_name, node.op.index)
        fits = op.infer(inputs) == outputs and reason_against(op, node.device.kind, inputs, outputs) is None
    except GpunetError:
        return None
    return _Turned(node, op, places, _gain(node)) if fits else None


def _shape(node: Node) -> tuple[int, ...]:
    spec = node.inputs[0].spec
    return spec.shape if isinstance(spec, TensorSpec) else ()


def _definition(op: Operator, places: Places, rank: int) -> OperatorDef:
    """The definition on tensors with channels innermost."""
    definition = OperatorDef()
    definition.CopyFrom(op.definition)
    for names, chosen in ((definition.input, places[0]), (definition.output, places[1])):
        for index in chosen:
            names[index] += SUFFIX
    along = op.schema.joins or op.schema.cuts
    dropped = ("order", "axis") if along else ("order",)
    kept = [arg for arg in definition.arg if arg.name not in dropped]
    del definition.arg[:]
    definition.arg.extend(kept)
    if along:
        definition.arg.add(name="axis", i=rank - 1)
    elif "order" in op.schema.arg_table and not op.schema.is_elementwise(op):
        definition.arg.add(name="order", s=b"NHWC")
    return definition


def _gain(node: Node) -> int:
    """Bytes that cuDNN moves in addition where a convolution has channels first."""
    op = node.op
    if op is None or op.type not in _FORWARD + _BACKWARD or op.definition.engine:
        return 0
    spec = node.inputs[0].spec
    if not isinstance(spec, TensorSpec) or not _on_tensor_cores(spec.dtype):
        return 0
    if op.type in _BACKWARD:
        x, w, dy = (value.nbytes for value in node.inputs[:3])
        data = len(node.outputs) == (2 if op.args.no_bias else 3)
        return 2 * (x + dy + w) * (2 if data else 1)
    x, w, y = (value.nbytes for value in (*node.inputs[:2], node.outputs[0]))
    return 2 * (x + w + y) + y * _passes(op)


def _passes(op: Operator) -> int:
    """How often a kernel of our own moves the output of a convolution with channels first."""
    if _adds(op):
        return 3
    return 2 if op.type == "FusedConv" and words_of(op.args)[0] != "bias" else 0


def _on_tensor_cores(dtype: np.dtype) -> bool:
    if dtype == np.float32:
        return bool(importlib.import_module("gpunet.cuda_kernels.cudnn").settings().tf32)
    return is_half(dtype)

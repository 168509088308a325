"""The graph of a run of operators: each write of a blob is a value of its own, and each operator a node
between values.

Passes (``gpunet/passes``) rewrite the list of nodes; the program then binds values to memory and nodes to
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpunet.devices import CPU, Device
from gpunet.kernels import Kernel
from gpunet.operator import Operator
from gpunet.specs import BlobSpec, TensorSpec


@dataclass(eq=False)
class Value:
    """What a blob holds between one write and the next, in the memory of one device.

    Attributes:
        name: the blob.
        spec: shape and type.
        device: where it lies, once placed.
        entry: whether the blob had it before the first node.
    """

    name: str
    spec: BlobSpec
    device: Device = CPU
    entry: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor; 0 of anything else."""
        return self.spec.nbytes if isinstance(self.spec, TensorSpec) else 0

    def __repr__(self) -> str:
        return f"{self.name}: {self.spec} on {self.device}"


@dataclass(eq=False)
class Node:
    """An operator between values, or (where ``op`` is ``None``) the copy of its input to the device of its
    output.

    ``index`` is the operator's position in the net; copies have that of the operator that they are made for.
    """

    op: Operator | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    index: int
    device: Device = CPU
    kernel: Kernel | None = None
    #: Outputs that a pass lets share the memory of an input: {output: input}.
    shares: dict[int, int] = field(default_factory=dict)
    #: Where in that memory such an output begins, in bytes, if not at its start: {output: offset}.
    offsets: dict[int, int] = field(default_factory=dict)
    #: Inputs that a pass lets lie in the memory of output 0, where they are written long before it, and where
    #: they begin there, in bytes: {input: offset}.
    holds: dict[int, int] = field(default_factory=dict)
    #: Whether the outputs are the same in every run as long as the entries that it reads are: then it runs
    #: once.
    constant: bool = False
    #: Whether it is work of the host on values that stay on several devices.
    spread: bool = False
    #: Values that must have been written before, though they are not read (``control_input``).
    after: tuple[Value, ...] = ()

    @property
    def where(self) -> str:
        """How messages name the node."""
        if self.op is not None:
            return self.op.where
        source, target = self.inputs[0], self.outputs[0]
        return f"[copy] blob {source.name!r} from {source.device} to {target.device}"

    def aliased(self, output: int) -> Value | None:
        """The input whose memory output number ``output`` is written to."""
        if output in self.shares:
            return self.inputs[self.shares[output]]
        if self.op is None or self.op.outputs[output] not in self.op.inputs:
            return None
        return self.inputs[self.op.inputs.index(self.op.outputs[output])]

    @property
    def overwrites(self) -> set[Value]:
        """The inputs whose memory it writes outputs to."""
        sources = {self.aliased(o) for o in range(len(self.outputs))}
        return {v for v in sources if v is not None} | {self.inputs[i] for i in self.holds}

    @property
    def repeatable(self) -> bool:
        """Whether equal inputs give equal outputs each time, in memory of their own, and no more."""
        op = self.op
        return (
            op is not None
            and bool(op.outputs)
            and not op.schema.random
            and not op.dynamic
            and not op.schema.host
            and not op.schema.chain
            and all(self.aliased(o) is None for o in range(len(self.outputs)))
        )

    def __repr__(self) -> str:
        kind = "copy" if self.op is None else self.op.type
        once = "constant " if self.constant else ""
        return f"{once}{kind} on {self.device}: {list(self.inputs)} -> {list(self.outputs)}"


@dataclass
class Graph:
    """Nodes in order, with the values that the blobs have at the end.

    Attributes:
        nodes: in the order in which they run.
        entries: values that blobs have before the first node and that nodes read.
        finals: for each blob that is written, the value that it ends with, once for each device that has it
            then.
    """

    nodes: list[Node] = field(default_factory=list)
    entries: list[Value] = field(default_factory=list)
    finals: dict[str, list[Value]] = field(default_factory=dict)


def overwritten(nodes: Iterable[Node]) -> set[Value]:
    """The values whose memory some node writes an output to."""
    return {value for node in nodes for value in node.overwrites}


def build(
    operators: Sequence[Operator], start: int, spec_of: Callable[[Operator, int], BlobSpec]
) -> tuple[Graph, int]:
    """The graph of the operators from ``start`` on, as far as inference reaches.

    Args:
        operators: all operators of the net.
        start: position of the first.
        spec_of: called with an operator and the index of an input that no operator from ``start`` on has
            made: what the blob is. Raises where it holds nothing.

    Returns:
        The graph, and the position of the first operator that is not in it: a dynamic one, whose output
        shapes depend on data, or the end.

    Raises:
        What inference raises, located at the operator.
    """
    graph = Graph()
    current: dict[str, Value] = {}
    for index in range(start, len(operators)):
        op = operators[index]
        inputs = []
        fresh = []
        for i, name in enumerate(op.inputs):
            value = current.get(name)
            if value is None:
                value = current[name] = Value(name, spec_of(op, i), entry=True)
                fresh.append(value)
            inputs.append(value)
        specs = op.infer([value.spec for value in inputs])
        if op.dynamic and not (specs and all(isinstance(s, TensorSpec) for s in specs)):
            return graph, index
        outputs = []
        for name, found in zip(op.outputs, specs, strict=True):
            if not isinstance(found, TensorSpec):
                raise op.error(
                    f"output {name!r} is {found}, wanted a tensor from an operator that is not dynamic"
                )
            outputs.append(Value(name, found))
        after = tuple(current[name] for name in op.definition.control_input if name in current)
        current.update((value.name, value) for value in outputs)
        graph.entries.extend(fresh)
        graph.finals.update((value.name, [value]) for value in outputs)
        graph.nodes.append(Node(op, tuple(inputs), tuple(outputs), index, after=after))
    return graph, len(operators)

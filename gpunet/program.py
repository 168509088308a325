"""Compiled nets: operators resolved once, bound to buffers, and run as a flat list of steps.

A net is cut at its dynamic operators (those whose output shapes depend on data) into segments. A static
segment is bound when it is first reached and again only when a blob that it touches was replaced (another
shape or type, or a buffer that another net claimed); between those times, running it is walking a list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np

from gpunet import philox
from gpunet.backends import backend
from gpunet.blobs import ALIGNMENT, EMPTY, Blob, aligned_bytes
from gpunet.buffers import Buffer
from gpunet.devices import CPU, Device
from gpunet.errors import BlobError, DeviceError, GpunetError, KernelError, NetError
from gpunet.graph import Graph, Node, Value, build
from gpunet.kernels import Kernel, KernelContext, RunState, exists, find
from gpunet.net import check_order
from gpunet.operator import Operator
from gpunet.passes.placement import insert_copies, place
from gpunet.proto import NetDef, OperatorDef
from gpunet.specs import BlobSpec, TensorSpec

if TYPE_CHECKING:
    from gpunet.workspace import Workspace

#: Net types of Caffe2. All of them run in order here.
NET_TYPES: Final = frozenset(
    [
        "",
        "simple",
        "simple_refcount",
        "async_simple",
        "rnn",
        "dag",
        "prof_dag",
        "async_dag",
        "async_polling",
        "async_scheduling",
        "parallel",
    ]
)
#: How many combinations of input shapes a segment remembers the graph of.
_MAX_CACHED_SHAPES: Final = 256


class Step(NamedTuple):
    """One bound node: ``function(*arguments)`` does its work."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    node: Node


class Program:
    """A net, ready to run in one workspace.

    Raises NetError, SchemaError, ArgumentError or DeviceError when made, before anything runs.
    """

    def __init__(self, net: NetDef, workspace: Workspace, state: RunState) -> None:
        if net.type not in NET_TYPES:
            raise NetError(
                f"net {net.name!r} has type {net.type!r}, wanted one of {', '.join(sorted(NET_TYPES - {''}))}"
            )
        check_order(net, workspace.has)
        self.name = net.name
        self.workspace = workspace
        self.state = state
        self.operators = [Operator(_with_device(net, op), net.name, i) for i, op in enumerate(net.op)]
        for op in self.operators:
            if not exists(op, CPU.kind, workspace.device.kind):
                raise DeviceError(f"no kernel is registered on the CPU or on {workspace.device}").locate(
                    op.where
                )
        self.contexts = self._make_contexts()
        self._scratch: dict[Device, Any] = {}
        self._step_buffers: dict[Device, Buffer] = {}
        self._segments: dict[int, Segment] = {}

    def run(self) -> None:
        """Runs all operators once.

        An error names the operator; blobs written before it keep their new values.
        """
        workspace = self.workspace
        for device, buffer in self._step_buffers.items():
            source = backend(device)
            source.copy_in(buffer, np.array([self.state.step], dtype=np.uint64), source.stream)
        position = 0
        with np.errstate(all="ignore"):
            while position < len(self.operators):
                segment = self._segments.get(position)
                if segment is None or segment.epoch != workspace.epoch:
                    segment = self._bound_segment(position)
                segment.run()
                position = segment.stop
        self.state.step += 1

    def _bound_segment(self, start: int) -> Segment:
        """The segment that starts at an operator, bound to the blobs as they are now."""
        segment = self._segments.get(start)
        if not isinstance(segment, StaticSegment):
            segment = StaticSegment(self, start)
        segment.bind()
        if segment.stop == start:
            segment = DynamicSegment(self, start)
        self._segments[start] = segment
        return segment

    def _make_contexts(self) -> list[KernelContext]:
        seen: Counter[str] = Counter()
        contexts = []
        for op in self.operators:
            output = op.outputs[0] if op.outputs else ""
            seed = op.definition.device_option.random_seed or self.workspace.seed
            key = philox.operator_id(self.name, output, seen[output])
            contexts.append(KernelContext(op, self.state, seed, key))
            seen[output] += 1
        return contexts

    def scratch(self, device: Device, specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
        """Storage for the scratch of one operator.

        All operators on a device share it: only one runs at a time.
        """
        offsets = [0]
        for s in specs:
            offsets.append(offsets[-1] + -(-s.nbytes // ALIGNMENT) * ALIGNMENT)
        memory: Any = self._scratch.get(device)
        if memory is None or memory.nbytes < offsets[-1]:
            memory = self._scratch[device] = _memory(device, offsets[-1])
        if device == CPU:
            return tuple(
                memory[at : at + s.nbytes].view(s.dtype).reshape(s.shape)
                for at, s in zip(offsets, specs, strict=False)
            )
        return tuple(
            Buffer(memory.backend, memory.memory, s.shape, s.dtype, at, "scratch")
            for at, s in zip(offsets, specs, strict=False)
        )

    def step_buffer(self, device: Device) -> Buffer:
        """The number of the run in a device's memory, for random kernels."""
        if device not in self._step_buffers:
            buffer = Buffer.from_numpy(backend(device), np.array([self.state.step], dtype=np.uint64), "step")
            self._step_buffers[device] = buffer
        return self._step_buffers[device]


class Segment(ABC):
    """A run of operators of a program, from one position to another."""

    def __init__(self, program: Program, start: int, stop: int) -> None:
        self.program = program
        self.start = start
        self.stop = stop
        #: The workspace's epoch at which the bindings were last known to hold.
        self.epoch = -1

    @abstractmethod
    def run(self) -> None:
        """Runs the segment once."""


class StaticSegment(Segment):
    """Operators whose output shapes follow from input shapes: from its start to the first one whose do not."""

    def __init__(self, program: Program, start: int) -> None:
        super().__init__(program, start, start)
        self._graphs: list[tuple[dict[str, BlobSpec], Graph, int]] = []
        self._steps: list[Step] = []
        self._stable = False
        self._bound: dict[tuple[str, Device], Any] = {}
        self._entries: list[tuple[Blob, Device]] = []
        self._finals: list[tuple[Blob, BlobSpec, frozenset[Device]]] = []

    def run(self) -> None:
        """Runs the bound steps, once what they read is where they read it."""
        for blob, device in self._entries:
            if device not in blob.valid:
                self.program.workspace.bring(blob.name, device)
        node: Node | None = None
        try:
            for function, arguments, node in self._steps:  # noqa: B007 (the handler names it)
                function(*arguments)
        except Exception as error:
            _blame(error, "" if node is None else node.where)
        for blob, spec, valid in self._finals:
            blob.commit(spec, valid)

    def bind(self) -> None:
        """Makes the segment ready to run on the blobs as they are now; sets where it stops."""
        workspace = self.program.workspace
        if not self._holds(workspace):
            self._bind(workspace)
        self.epoch = workspace.epoch if self._stable else -1

    def _holds(self, workspace: Workspace) -> bool:
        return self._stable and all(
            workspace.storage(name, device) is storage for (name, device), storage in self._bound.items()
        )

    def _bind(self, workspace: Workspace) -> None:
        self._stable = False
        graph = self._graph(workspace)
        storage: dict[Value, Any] = {}
        for value in graph.entries:
            storage[value] = _entry(workspace, value)
        entries = {(v.name, v.device): storage[v] for v in graph.entries}
        for node in graph.nodes:
            for o, value in enumerate(node.outputs):
                storage[value] = _output(workspace, node, o, storage)
        finals = {(v.name, v.device): storage[v] for values in graph.finals.values() for v in values}
        self._steps = self._make_steps(graph, storage)
        self._bound = entries | finals
        committed = [
            (workspace.blob(name), vs[0].spec, frozenset(v.device for v in vs))
            for name, vs in graph.finals.items()
        ]
        if workspace.device == CPU:
            # Nothing can go stale between runs, so this is said once.
            for blob, spec, valid in committed:
                blob.commit(spec, valid)
            self._entries, self._finals = [], []
        else:
            self._entries = [(workspace.blob(name), device) for name, device in entries]
            self._finals = committed
        # Where a run leaves another shape in a blob that it starts from, the next run starts from that one.
        self._stable = all(finals.get(key, value) is value for key, value in entries.items())

    def _graph(self, workspace: Workspace) -> Graph:
        for specs, graph, stop in self._graphs:
            if all(_equal(workspace.spec(name), found) for name, found in specs.items()):
                self.stop = stop
                return graph
        specs = {}

        def spec_of(op: Operator, index: int) -> BlobSpec:
            name = op.inputs[index]
            found = workspace.spec(name)
            if found is None:
                raise _missing(workspace, op, index)
            specs[name] = found
            return found

        graph, self.stop = build(self.program.operators, self.start, spec_of)
        graph = insert_copies(place(graph, workspace.device, strict=workspace.strict))
        del self._graphs[_MAX_CACHED_SHAPES - 1 :]
        self._graphs.insert(0, (specs, graph, self.stop))
        return graph

    def _make_steps(self, graph: Graph, storage: dict[Value, Any]) -> list[Step]:
        program = self.program
        wanted = [_wanted_scratch(node) for node in graph.nodes]
        for node, specs in zip(graph.nodes, wanted, strict=True):
            program.scratch(node.device, specs)
        steps = []
        for node, specs in zip(graph.nodes, wanted, strict=True):
            inputs = tuple(storage[v] for v in node.inputs)
            outputs = tuple(storage[v] for v in node.outputs)
            if node.op is None:
                steps.append(Step(_copy(inputs[0], outputs[0]), (), node))
                continue
            context = program.contexts[node.index]
            context.scratch = program.scratch(node.device, specs)
            if node.device != CPU:
                context.backend = backend(node.device)
                context.stream = context.backend.stream
                if node.op.schema.random:
                    context.step_buffer = program.step_buffer(node.device)
            steps.append(_make_step(node, _kernel(node), (inputs, outputs, node.op.args, context)))
        return steps


class DynamicSegment(Segment):
    """One operator that returns fresh values: their shapes depend on data, or they are no tensors.

    It runs on the CPU.
    """

    def __init__(self, program: Program, start: int) -> None:
        super().__init__(program, start, start + 1)
        self._op = program.operators[start]
        self._kernel = find(self._op, CPU.kind)

    def run(self) -> None:
        """Runs the kernel and takes over what it returns."""
        op, workspace = self._op, self.program.workspace
        inputs = tuple(_read(workspace, op, i) for i in range(len(op.inputs)))
        values = _fresh_values(self._kernel, inputs, self.program.contexts[self.start])
        for name, value in zip(op.outputs, values, strict=True):
            workspace.put(name, value)


def _fresh_values(kernel: Kernel, inputs: tuple[Any, ...], context: KernelContext) -> Sequence[Any]:
    """What the kernel of a dynamic operator returns."""
    op = context.op
    try:
        result = kernel.function(inputs, (), op.args, context)
        values: Sequence[Any] = result() if kernel.binds else result
        return values
    except Exception as error:
        _blame(error, op.where)


def _fill_outputs(
    kernel: Kernel, inputs: tuple[Any, ...], outputs: tuple[Any, ...], context: KernelContext
) -> None:
    """Runs the kernel of a dynamic operator where its shapes are known after all."""
    for target, value in zip(outputs, _fresh_values(kernel, inputs, context), strict=True):
        np.copyto(target, value)


def _with_device(net: NetDef, op: OperatorDef) -> OperatorDef:
    if not net.HasField("device_option") or op.HasField("device_option"):
        return op
    copy = OperatorDef()
    copy.CopyFrom(op)
    copy.device_option.CopyFrom(net.device_option)
    return copy


def _equal(a: BlobSpec | None, b: BlobSpec) -> bool:
    return a == b and (not isinstance(b, TensorSpec) or (isinstance(a, TensorSpec) and a.known == b.known))


def _missing(workspace: Workspace, op: Operator, index: int) -> BlobError:
    name, declared = op.inputs[index], op.schema.input_at(index).name
    state = "holds nothing yet" if workspace.has(name) else "does not exist"
    error = BlobError(f"input {declared}: blob {name!r} {state}, wanted one that was fed or made before")
    return error.locate(op.where)


def _read(workspace: Workspace, op: Operator, index: int) -> Any:
    value = workspace.value(op.inputs[index])
    if value is EMPTY:
        raise _missing(workspace, op, index)
    return value


def _entry(workspace: Workspace, value: Value) -> Any:
    if isinstance(value.spec, TensorSpec):
        return workspace.allocate(value.name, value.spec, value.device)
    return workspace.value(value.name)


def _output(workspace: Workspace, node: Node, index: int, storage: dict[Value, Any]) -> Any:
    value, aliased = node.outputs[index], node.aliased(index)
    spec = value.spec
    if not isinstance(spec, TensorSpec):
        raise KernelError(f"output {value.name!r} is {spec}, wanted a tensor").locate(node.where)
    if aliased is None:
        return workspace.allocate(value.name, spec, value.device)
    found = storage[aliased]
    if (found.shape, found.dtype) != (spec.shape, spec.dtype):
        found = (
            found.reshape(-1).view(spec.dtype).reshape(spec.shape)
            if value.device == CPU
            else found.view(spec.shape, spec.dtype)
        )
        workspace.set_storage(value.name, found, spec, value.device)
    return found


def _kernel(node: Node) -> Kernel:
    if node.kernel is None:
        raise DeviceError("no kernel was chosen, wanted the placement pass to run first").locate(node.where)
    return node.kernel


def _wanted_scratch(node: Node) -> Sequence[TensorSpec]:
    if node.op is None or node.kernel is None or node.kernel.scratch is None:
        return ()
    return node.kernel.scratch(node.op, [v.spec for v in node.inputs], [v.spec for v in node.outputs])


def _memory(device: Device, size: int) -> Any:
    if device == CPU:
        return aligned_bytes(size)
    return Buffer.empty(backend(device), TensorSpec((size,), np.dtype(np.uint8)), "scratch")


def _copy(source: Any, target: Any) -> Callable[[], None]:
    if isinstance(target, Buffer):
        return partial(target.backend.copy_in, target, source, target.backend.stream)
    return partial(source.backend.copy_out, target, source, source.backend.stream)


def _make_step(node: Node, kernel: Kernel, arguments: tuple[Any, ...]) -> Step:
    inputs, outputs, _, context = arguments
    if node.device == CPU and context.op.dynamic:
        return Step(_fill_outputs, (kernel, inputs, outputs, context), node)
    if not kernel.binds:
        return Step(kernel.function, arguments, node)
    try:
        return Step(kernel.function(*arguments), (), node)
    except Exception as error:
        _blame(error, node.where)


def _blame(error: Exception, where: str) -> NoReturn:
    if isinstance(error, GpunetError):
        raise error.locate(where)
    raise KernelError(f"the kernel failed: {type(error).__name__}: {error}").locate(where) from error

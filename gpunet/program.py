"""Compiled nets: operators resolved once, compiled for the shapes at hand, bound to buffers, run by an
engine.

A net is cut at its dynamic operators (those whose output shapes depend on data) into segments. A static
segment is compiled when it is first reached with new shapes, and bound again only when a blob that it touches
was replaced (another shape or type, or a buffer that another net claimed); between those times, running it is
walking a list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpunet import philox
from gpunet.backends import Stream, backend
from gpunet.binding import Binding, Compiled, Memory, bind, blame, compile_graph, fresh_values
from gpunet.blas import ONE_BLAS_THREAD
from gpunet.blobs import EMPTY, Blob
from gpunet.buffers import Buffer
from gpunet.devices import CPU, Device, requested_device
from gpunet.engines import Step, StepFailed, run_lanes, run_simple
from gpunet.errors import BlobError, DeviceError
from gpunet.graph import Graph, Node, Value, build
from gpunet.graph_engine import run_graph, run_live
from gpunet.kernels import KernelContext, RunState, StopNet, exists, find
from gpunet.net import check_kept, check_order, check_types
from gpunet.observers import Observer, observed
from gpunet.operator import Operator
from gpunet.options import ASYNC, GRAPH, SIMPLE, Options
from gpunet.passes.pipeline import MEMORY_PLAN, PassContext, check_names, run_passes
from gpunet.proto import NetDef, OperatorDef
from gpunet.schedule import Lane
from gpunet.specs import BlobSpec, OpaqueSpec, TensorSpec

if TYPE_CHECKING:
    from gpunet.workspace import Workspace

#: How many combinations of input shapes a segment remembers the compiled form of.
_MAX_CACHED_SHAPES: Final = 256
_RUNNERS: Final[dict[str, Callable[[Sequence[Step]], Callable[[], None]]]] = {
    SIMPLE: run_simple,
    ASYNC: run_lanes,
    GRAPH: run_graph,
}
#: Observers are called from the host, in the middle of the work: nothing can be captured then.
_OBSERVED_RUNNERS: Final[dict[str, Callable[[Sequence[Step]], Callable[[], None]]]] = {
    **_RUNNERS,
    GRAPH: run_live,
}


class Program:
    """A net, ready to run in one workspace.

    Raises NetError, SchemaError, ArgumentError or DeviceError when made, before anything runs.
    """

    def __init__(self, net: NetDef, workspace: Workspace, state: RunState, options: Options) -> None:
        check_types(net)
        check_order(net, workspace.has)
        check_kept(net, options.keep or (), workspace.has)
        check_names(options.without)
        self.name = net.name
        self.workspace = workspace
        self.state = state
        self.options = options
        self.operators = [Operator(_with_device(net, op), net.name, i) for i, op in enumerate(net.op)]
        for op in self.operators:
            _check_device(op)
            if not exists(op, CPU.kind, workspace.device.kind):
                raise DeviceError(f"no kernel is registered on the CPU or on {workspace.device}").locate(
                    op.where
                )
        self.contexts = self._make_contexts()
        self.memory = Memory()
        self._added_contexts: dict[Operator, KernelContext] = {}
        self._external = frozenset(net.external_input)
        self._step_buffers: dict[Device, Buffer] = {}
        self._streams: dict[Lane, Stream] = {}
        self._segments: dict[int, Segment] = {}
        self._observers: tuple[Observer, ...] = ()
        #: Called with the name of each pass and the graph after it whenever a segment is compiled; first with
        #: ``inference`` and the graph that no pass has seen.
        self.seen: Callable[[str, Graph], None] | None = None

    @property
    def observers(self) -> tuple[Observer, ...]:
        """What is called before and after each step (:mod:`gpunet.observers`); nothing by default."""
        return self._observers

    @observers.setter
    def observers(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        for segment in self._segments.values():
            segment.wrap()

    def prepare(self) -> None:
        """Compiles and binds all segments without a run of the net.

        Where output shapes depend on data, all that comes before and with the last of these operators has to
        run.
        """
        position = 0
        with np.errstate(all="ignore"), ONE_BLAS_THREAD, suppress(StopNet):
            while position < len(self.operators):
                segment = self._bound_segment(position)
                if segment.stop < len(self.operators):
                    segment.run()
                position = segment.stop

    def run(self) -> None:
        """Runs all operators once.

        An error names the operator; blobs written before it keep their new values.
        """
        workspace = self.workspace
        for device, buffer in self._step_buffers.items():
            source = backend(device)
            source.copy_in(buffer, np.array([self.state.step], dtype=np.uint64), source.stream)
        position = 0
        with np.errstate(all="ignore"), ONE_BLAS_THREAD, suppress(StopNet):
            while position < len(self.operators):
                segment = self._segments.get(position)
                if segment is None or segment.epoch != workspace.epoch:
                    segment = self._bound_segment(position)
                segment.run()
                position = segment.stop
        self.state.step += 1

    def segments(self) -> list[StaticSegment]:
        """The static segments of the last run, in order."""
        return [segment for segment in self.bound() if isinstance(segment, StaticSegment)]

    def bound(self) -> list[Segment]:
        """All segments that are bound, in order."""
        return [segment for _, segment in sorted(self._segments.items())]

    def kept(self, position: int) -> Callable[[str], bool]:
        """Whether a blob must hold its value when the operators before ``position`` have run."""
        keep = self.options.keep
        if keep is None:
            return lambda name: True
        later = {name for op in self.operators[position:] for name in op.inputs}
        return lambda name: name in keep or name in self._external or name in later

    def stream(self, lane: Lane) -> Stream | None:
        """The stream of a GPU lane; ``None`` for the host. The first lane of a device is its main stream."""
        if lane.device == CPU:
            return None
        if lane not in self._streams:
            device = backend(lane.device)
            self._streams[lane] = device.new_stream() if lane.number else device.stream
        return self._streams[lane]

    def step_buffer(self, device: Device) -> Buffer:
        """The number of the run in a device's memory, for random kernels."""
        if device not in self._step_buffers:
            buffer = Buffer.from_numpy(backend(device), np.array([self.state.step], dtype=np.uint64), "step")
            self._step_buffers[device] = buffer
        return self._step_buffers[device]

    def context(self, op: Operator, index: int) -> KernelContext:
        """The context of an operator at a position of the net, or of one that a pass has put there."""
        if self.operators[index] is op:
            return self.contexts[index]
        if op not in self._added_contexts:
            original = self.contexts[index]
            self._added_contexts[op] = KernelContext(op, self.state, original.seed, original.operator_id)
        return self._added_contexts[op]

    def _bound_segment(self, start: int) -> Segment:
        """The segment that starts at an operator, bound to the blobs as they are now."""
        segment = self._segments.get(start)
        if isinstance(segment, DynamicSegment) and segment.holds():
            return segment
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

    @abstractmethod
    def wrap(self) -> None:
        """Puts the program's observers around the steps, or takes away those that have gone."""


class StaticSegment(Segment):
    """Operators whose output shapes follow from input shapes: from its start to the first one whose do
    not.
    """

    def __init__(self, program: Program, start: int) -> None:
        super().__init__(program, start, start)
        #: What is bound now: the compiled form, and its binding.
        self.compiled: Compiled | None = None
        self.binding = Binding()
        self._cache: list[tuple[dict[str, BlobSpec], Compiled, int]] = []
        self._stable = False
        #: Runs the bound steps.
        self.execute: Callable[[], None] = run_simple([])
        self._execute_constants: Callable[[], None] = run_simple([])
        self._entries: list[tuple[Blob, Device, Any]] = []
        self._finals: list[tuple[Blob, BlobSpec, frozenset[Device]]] = []
        self._sources: list[Blob] = []
        self._versions: list[int] | None = None

    def run(self) -> None:
        """Runs the bound steps, once what they read is where they read it."""
        for blob, device, storage in self._entries:
            if device not in blob.valid:
                self.program.workspace.bring(blob.name, device, storage)
        try:
            if self._versions is not None:
                self._refresh_constants()
            self.execute()
        except BaseException as error:
            self._settle()
            if not isinstance(error, StepFailed):
                raise
            if error.node is None or not isinstance(error.error, Exception):
                raise error.error from None
            blame(error.error, error.node.where)
        for (name, device), (storage, found) in self.binding.replaced.items():
            self.program.workspace.set_storage(name, storage, found, device)
        for blob, spec, valid in self._finals:
            blob.commit(spec, valid)

    def _settle(self) -> None:
        """After a run that did not end: where a device had the value of a blob that the run may have written
        there, that is the value now, and copies elsewhere are those of another one.
        """
        for blob, _, devices in self._finals:
            there = blob.valid & devices
            if there:
                blob.commit(blob.spec, there)

    def wrap(self) -> None:
        """Puts the program's observers around the steps, or takes away those that have gone."""
        program, binding = self.program, self.binding
        runners = _OBSERVED_RUNNERS if program.observers else _RUNNERS
        read = binding.values.__getitem__
        steps = observed(binding.steps, program.observers, read, self.start)
        self.execute = runners[program.options.engine](steps)
        self._execute_constants = run_simple(observed(binding.constants, program.observers, read, self.start))

    def bind(self) -> None:
        """Makes the segment ready to run on the blobs as they are now; sets where it stops."""
        workspace = self.program.workspace
        if not self._holds(workspace) or self._unwatched():
            self._bind(workspace)
        self.epoch = workspace.epoch if self._stable else -1

    def _refresh_constants(self) -> None:
        """Computes the constants anew if a blob that they come from has changed."""
        versions = [blob.version for blob in self._sources]
        if versions != self._versions:
            self._execute_constants()
            self._versions = versions

    def _watch_sources(self, workspace: Workspace) -> None:
        """Looks after the blobs that constants come from: programs that write them must say so."""
        nodes = [step.node for step in self.binding.constants]
        self._sources = [
            workspace.blob(v.name) for v in dict.fromkeys(v for n in nodes for v in n.inputs if v.entry)
        ]
        self._versions = [-1] if nodes else None
        if not all(blob.watched for blob in self._sources):
            # Programs that are bound already learn of it when they bind again.
            workspace.epoch += 1
        for blob in self._sources:
            blob.watched = True

    def _holds(self, workspace: Workspace) -> bool:
        if not self._stable or self.compiled is None:
            return False
        # A blob that was fed keeps its old storage on another device until it is brought there.
        if any(workspace.spec(value.name) != value.spec for value in self.compiled.graph.entries):
            return False
        bound = self.binding.entries | self.binding.finals
        return all(workspace.storage(name, device) is storage for (name, device), storage in bound.items())

    def _unwatched(self) -> bool:
        """Whether it writes a blob that has come to be watched since it was bound."""
        announced = {blob for blob, _, _ in self._finals}
        return any(
            blob.watched and blob not in announced
            for blob in (self.program.workspace.blob(name) for name, _ in self.binding.finals)
        )

    def _bind(self, workspace: Workspace) -> None:
        self._stable = False
        compiled = self.compiled = self._compile(workspace)
        binding = self.binding = bind(self.program, compiled)
        self.wrap()
        committed = []
        for name, values in compiled.graph.finals.items():
            visible = [v for v in values if compiled.places[v].blob]
            if visible:
                devices = frozenset(v.device for v in visible)
                committed.append((workspace.blob(name), visible[0].spec, devices))
            else:
                workspace.hide(name, self.program.name)
        if workspace.device == CPU:
            # Nothing can go stale between runs, so this is said once.
            later = {name for name, _ in binding.replaced}
            for blob, spec, valid in committed:
                if blob.name not in later:
                    blob.commit(spec, valid)
            self._entries = []
            self._finals = [entry for entry in committed if entry[0].watched or entry[0].name in later]
        else:
            self._entries = [
                (workspace.blob(name), device, storage) for (name, device), storage in binding.entries.items()
            ]
            self._finals = committed
        self._watch_sources(workspace)
        # Where a run leaves another shape in a blob that it starts from, the next run starts from that one.
        self._stable = all(binding.finals.get(key, value) is value for key, value in binding.entries.items())

    def _compile(self, workspace: Workspace) -> Compiled:
        for specs, compiled, stop in self._cache:
            if all(_equal(workspace.spec(name), found) for name, found in specs.items()):
                self.stop = stop
                return compiled
        specs = {}

        def spec_of(op: Operator, index: int) -> BlobSpec:
            name = op.inputs[index]
            found = workspace.spec(name)
            if found is None:
                raise _missing(workspace, op, index)
            specs[name] = found
            return found

        program, options = self.program, self.program.options
        graph, self.stop = build(program.operators, self.start, spec_of)
        entries = {value.name for value in graph.entries}
        visible = program.kept(self.stop)

        def kept(name: str) -> bool:
            return name in entries or visible(name)

        if self.start < self.stop or not program.operators:
            context = PassContext(workspace.device, workspace.strict, kept, options.recompute)
            if program.seen is not None:
                program.seen("inference", graph)
            graph = run_passes(graph, context, options.without, program.seen)
        share = MEMORY_PLAN not in options.without
        compiled = compile_graph(graph, kept, options, plan_memory=share)
        del self._cache[_MAX_CACHED_SHAPES - 1 :]
        self._cache.insert(0, (specs, compiled, self.stop))
        return compiled


class DynamicSegment(Segment):
    """One operator that returns fresh values: their shapes depend on data, or they are no tensors.

    It runs on the CPU.
    """

    def __init__(self, program: Program, start: int) -> None:
        super().__init__(program, start, start + 1)
        op = self._op = program.operators[start]
        self._specs = {name: program.workspace.spec(name) for name in op.inputs}
        self._kernel = find(op, CPU.kind)
        unknown = OpaqueSpec("unknown before it runs")
        inputs, outputs = (tuple(Value(name, unknown) for name in names) for names in (op.inputs, op.outputs))
        self.step = Step(self._compute, (), Node(op, inputs, outputs, start, CPU, self._kernel), Lane(CPU))
        self._wrapped = self.step
        self.wrap()

    def wrap(self) -> None:
        """Puts the program's observers around the step, or takes away those that have gone."""
        workspace = self.program.workspace
        (self._wrapped,) = observed(
            [self.step], self.program.observers, lambda value: workspace.value(value.name), self.start
        )

    def holds(self) -> bool:
        """Whether inputs are what they were when its output shapes could not be told from them."""
        workspace = self.program.workspace
        return all(
            found is not None and _equal(workspace.spec(name), found) for name, found in self._specs.items()
        )

    def run(self) -> None:
        """Runs the kernel and takes over what it returns."""
        try:
            self._wrapped.function(*self._wrapped.arguments)
        except StopNet:
            raise
        except Exception as error:
            blame(error, self._op.where)

    def _compute(self) -> None:
        op, workspace = self._op, self.program.workspace
        inputs = tuple(_read(workspace, op, i) for i in range(len(op.inputs)))
        values = fresh_values(self._kernel, inputs, self.program.contexts[self.start])
        for name, value in zip(op.outputs, values, strict=True):
            workspace.put(name, value)


def _check_device(op: Operator) -> None:
    """Raises :class:`DeviceError` for a device that nothing knows, before anything runs."""
    try:
        requested_device(op.definition)
    except DeviceError as error:
        raise error.locate(op.where) from None


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
    label = op.schema.input_label(index)
    return BlobError(f"input {label}: {workspace.absence(op.inputs[index])}").locate(op.where)


def _read(workspace: Workspace, op: Operator, index: int) -> Any:
    value = workspace.value(op.inputs[index])
    if value is EMPTY:
        raise _missing(workspace, op, index)
    return value

"""Binding: from a graph of nodes to steps on buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gpunet.backends import Stream, backend
from gpunet.blobs import ALIGNMENT, aligned_bytes
from gpunet.buffers import Buffer
from gpunet.devices import CPU, Device
from gpunet.engines import Step
from gpunet.errors import AllocationError, DeviceError, GpunetError, KernelError
from gpunet.graph import Graph, Node, Value
from gpunet.graph_engine import by_phase
from gpunet.kernels import Kernel, KernelContext, wanted_scratch
from gpunet.memory_plan import MemoryPlan, plan
from gpunet.options import ASYNC, GRAPH, Options
from gpunet.schedule import Item, Lane, Schedule, copy_lane, order, schedule
from gpunet.specs import BlobSpec, TensorSpec
from gpunet.storage import Storage, assign, dependencies
from gpunet.widening import is_narrow, widened

if TYPE_CHECKING:
    from gpunet.program import Program
    from gpunet.workspace import Workspace


@dataclass
class Compiled:
    """All that is known of a segment before it is bound: it depends on shapes and options only, not on
    buffers.
    """

    graph: Graph
    places: dict[Value, Storage]
    schedule: Schedule
    memory: MemoryPlan


def compile_graph(
    graph: Graph, kept: Callable[[str], bool], options: Options, *, plan_memory: bool
) -> Compiled:
    """Storage, schedule and memory plan of a graph that all passes have run on."""
    places = assign(graph, kept)
    nodes = [node for node in graph.nodes if not node.constant]
    if options.engine == GRAPH:
        nodes = by_phase(nodes, dependencies(nodes, places))
    made = schedule(nodes, dependencies(nodes, places), options.lanes)
    return Compiled(graph, places, made, plan(made, places, share=plan_memory))


@dataclass
class Binding:
    """Steps, and what they are bound to.

    Attributes:
        steps: in the order of the schedule.
        constants: steps that run once, before the others, and again when an entry that they read has changed.
        values: storage of each value: arrays on the host, buffers elsewhere.
        entries, finals: storage of blobs at the start and at the end, by (blob, device).
        replaced: those of ``finals`` that a blob gets when a run has ended, with their shape and type: until
            then it holds another one, from which the run starts.
    """

    steps: list[Step] = field(default_factory=list)
    constants: list[Step] = field(default_factory=list)
    values: dict[Value, Any] = field(default_factory=dict)
    entries: dict[tuple[str, Device], Any] = field(default_factory=dict)
    finals: dict[tuple[str, Device], Any] = field(default_factory=dict)
    replaced: dict[tuple[str, Device], tuple[Any, BlobSpec]] = field(default_factory=dict)


class Memory:
    """Scratch and arenas of one program: grown when needed, shared by its segments, of which one runs at a
    time.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, Device, int], Any] = {}

    def block(self, purpose: str, device: Device, size: int, lane: int = 0) -> Any:
        """Memory of at least ``size`` bytes: an array of bytes on the host, a buffer elsewhere."""
        key = (purpose, device, lane)
        found = self._blocks.get(key)
        if found is None or found.nbytes < size:
            spec = TensorSpec((size,), np.dtype(np.uint8))
            found = aligned_bytes(size) if device == CPU else Buffer.empty(backend(device), spec, purpose)
            self._blocks[key] = found
        return found


def view(block: Any, offset: int, spec: TensorSpec, name: str) -> Any:
    """A tensor at an offset of a block of memory."""
    if isinstance(block, Buffer):
        return Buffer(block.backend, block.memory, spec.shape, spec.dtype, block.offset + offset, name)
    return block[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)


def bind(program: Program, compiled: Compiled) -> Binding:
    """Storage for all values, and a step for each item of the schedule."""
    workspace, memory = program.workspace, program.memory
    result = Binding()
    for value in compiled.graph.entries:
        result.values[value] = _entry(workspace, value)
        result.entries[value.name, value.device] = result.values[value]
    before = {value.name: value.spec for value in compiled.graph.entries}
    arenas = {}
    for device, size in compiled.memory.arenas.items():
        with _asked_by(*_largest(compiled, device, size)):
            arenas[device] = memory.block("arena", device, size)
    for node in compiled.graph.nodes:
        for index, value in enumerate(node.outputs):
            with _asked_by(node, f"output {value.name!r} ({value.spec})"):
                result.values[value] = _output(
                    workspace, node, index, result.values, before, compiled, arenas
                )
    for values in compiled.graph.finals.values():
        for value in values:
            if compiled.places[value].blob:
                key = value.name, value.device
                result.finals[key] = result.values[value]
                if before.get(value.name, value.spec) != value.spec:
                    result.replaced[key] = result.values[value], value.spec
    constants = [node for node in compiled.graph.nodes if node.constant]
    once = order(constants, [Lane(node.device) for node in constants], [set() for _ in constants])
    result.constants = _make_steps(program, once.items, result.values)
    result.steps = _make_steps(program, compiled.schedule.items, result.values)
    return result


@contextmanager
def _asked_by(node: Node | None, what: str) -> Iterator[None]:
    """Says for which operator there was no memory."""
    try:
        yield
    except (AllocationError, DeviceError) as error:
        if node is None or error.location:
            raise
        raise type(error)(f"{what}: {error}").locate(node.where) from None


def _largest(compiled: Compiled, device: Device, size: int) -> tuple[Node | None, str]:
    """The operator of the largest output in an arena, and words for both."""
    outputs = [(value, node) for node in compiled.graph.nodes for value in node.outputs]
    inside = [
        (compiled.places[value].nbytes, value, node)
        for value, node in outputs
        if compiled.places[value].internal and value.device == device
    ]
    if not inside:
        return None, ""
    _, value, node = max(inside, key=lambda found: found[0])
    return node, f"an arena of {size:,} bytes, in which output {value.name!r} ({value.spec}) is the largest"


def _entry(workspace: Workspace, value: Value) -> Any:
    if isinstance(value.spec, TensorSpec):
        return workspace.allocate(value.name, value.spec, value.device)
    return workspace.value(value.name)


def _output(
    workspace: Workspace,
    node: Node,
    index: int,
    values: Mapping[Value, Any],
    before: Mapping[str, BlobSpec],
    compiled: Compiled,
    arenas: Mapping[Device, Any],
) -> Any:
    value, source = node.outputs[index], node.aliased(index)
    spec, storage = value.spec, compiled.places[value]
    if not isinstance(spec, TensorSpec):
        raise KernelError(f"output {value.name!r} is {spec}, wanted a tensor").locate(node.where)
    # The blob keeps what the run starts from until it has ended.
    replaces = before.get(storage.blob, spec) != spec
    if source is None:
        if storage.blob and not replaces:
            return workspace.allocate(value.name, spec, value.device)
        if spec.dtype.hasobject:
            return np.full(spec.shape, b"", dtype=object)
        if storage.constant or replaces:
            return _own_memory(value, spec)
        start = compiled.memory.offsets[storage] + storage.starts.get(value, 0)
        return view(arenas[value.device], start, spec, value.name)
    found = values[source]
    if (found.shape, found.dtype) != (spec.shape, spec.dtype):
        found = _part(found, node.offsets.get(index, 0), spec, value.name)
        if storage.blob and not replaces:
            workspace.set_storage(storage.blob, found, spec, value.device)
    return found


def _own_memory(value: Value, spec: TensorSpec) -> Any:
    if value.device == CPU:
        return view(aligned_bytes(spec.nbytes), 0, spec, value.name)
    return Buffer.empty(backend(value.device), spec, value.name)


def _part(storage: Any, offset: int, spec: TensorSpec, name: str) -> Any:
    """A tensor in the memory of another one."""
    if isinstance(storage, Buffer):
        return view(storage, offset, spec, name)
    flat = storage.reshape(-1).view(np.uint8)
    return flat[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)


def _make_steps(program: Program, items: Sequence[Item], values: Mapping[Value, Any]) -> list[Step]:
    wanted = [_wanted_scratch(item.node) for item in items]
    offsets = [_offsets(specs) for specs in wanted]
    # The largest first: a block that grows is a second block for a while.
    for item, places in sorted(zip(items, offsets, strict=True), key=lambda pair: -pair[1][-1]):
        with _asked_by(item.node, "scratch memory"):
            program.memory.block("scratch", item.node.device, places[-1], item.lane.number)
    steps = []
    for item, specs, places in zip(items, wanted, offsets, strict=True):
        inputs = tuple(values[v] for v in item.node.inputs)
        outputs = tuple(values[v] for v in item.node.outputs)
        if item.node.op is None:
            steps.append(_copy_step(program, item, inputs[0], outputs[0]))
            continue
        stream = program.stream(item.lane)
        block = program.memory.block("scratch", item.node.device, places[-1], item.lane.number)
        context = program.context(item.node.op, item.node.index)
        context.scratch = tuple(view(block, at, s, "scratch") for at, s in zip(places, specs, strict=False))
        if stream is not None:
            context.stream = stream
            context.backend = backend(item.node.device)
            if item.node.op.schema.random:
                context.step_buffer = program.step_buffer(item.node.device)
        steps.append(_kernel_step(item, inputs, outputs, context, stream, program.options.engine))
    return steps


def _wanted_scratch(node: Node) -> Sequence[TensorSpec]:
    if node.op is None or node.kernel is None:
        return ()
    specs = [v.spec for v in node.inputs], [v.spec for v in node.outputs]
    return wanted_scratch(node.kernel, node.op, *specs, node.device)


def _offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor starts in a block that holds them all, and, last, the size of the block in bytes."""
    offsets = [0]
    for s in specs:
        offsets.append(offsets[-1] + -(-s.nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets


def _copy_step(program: Program, item: Item, source: Any, target: Any) -> Step:
    stream = program.stream(item.lane)
    if isinstance(target, Buffer):
        if program.options.engine == GRAPH or stream is None:
            # Between graphs, which are launched on the main stream.
            stream = target.backend.stream
        function = partial(target.backend.copy_in, target, source, stream)
    else:
        device = source.backend.device
        lanes = program.options.lanes.get(device.kind, 1)
        # With lanes the host has waited for the bytes; on the main stream it would wait for later work, too.
        apart = program.options.engine == ASYNC and lanes > 1 and not item.node.constant
        reader = program.stream(copy_lane(device, lanes, out=True)) if apart else source.backend.stream
        function = partial(source.backend.copy_out, target, source, reader)
    return Step(function, (), item.node, item.lane, item.waits, stream)


def _kernel_step(
    item: Item,
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
    context: KernelContext,
    stream: Stream | None,
    engine: str,
) -> Step:
    node, op, kernel = item.node, context.op, item.node.kernel
    if kernel is None:
        raise DeviceError("no kernel was chosen, wanted the placement pass to run first").locate(node.where)
    arguments: tuple[Any, ...] = (inputs, outputs, op.args, context)
    function: Callable[..., Any] = kernel.function
    if node.device == CPU and op.dynamic:
        function, arguments = _fill_outputs, (kernel, inputs, outputs, context)
    elif kernel.binds:
        try:
            function, arguments = function(*arguments), ()
        except Exception as error:
            blame(error, node.where)
    if node.spread and engine != ASYNC:
        # Without lanes nothing has waited for what is on the devices' streams.
        function = partial(_when_done, [b.backend.stream for b in inputs], function)
    return Step(function, arguments, node, item.lane, item.waits, stream)


def _when_done(streams: Sequence[Stream], function: Callable[..., Any], *arguments: Any) -> None:
    for stream in streams:
        stream.synchronize()
    function(*arguments)


def fresh_values(kernel: Kernel, inputs: tuple[Any, ...], context: KernelContext) -> Sequence[Any]:
    """What the kernel of a dynamic operator returns."""
    if any(is_narrow(x) for x in inputs):
        kernel = widened(kernel)
    result = kernel.function(inputs, (), context.op.args, context)
    values: Sequence[Any] = result() if kernel.binds else result
    return values


def _fill_outputs(
    kernel: Kernel, inputs: tuple[Any, ...], outputs: tuple[Any, ...], context: KernelContext
) -> None:
    """Runs the kernel of a dynamic operator where its shapes are known after all."""
    for target, value in zip(outputs, fresh_values(kernel, inputs, context), strict=True):
        np.copyto(target, value)


def blame(error: Exception, where: str) -> NoReturn:
    """Raises ``error`` as one of ours, located at an operator."""
    if isinstance(error, GpunetError):
        raise error.locate(where)
    raise KernelError(f"the kernel failed: {type(error).__name__}: {error}").locate(where) from error

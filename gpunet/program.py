"""Compiled nets: operators resolved once, bound to buffers, and run as a flat list of steps.

A net is cut at its dynamic operators (those whose output shapes depend on data) into segments. A static segment is bound when it is first
reached and again only when a blob that it touches was replaced (another shape or type, or a buffer that another net claimed);
between those times, running it is walking a list.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from gpunet import philox
from gpunet.blobs import ALIGNMENT, EMPTY, aligned_bytes
from gpunet.devices import Device, requested_device
from gpunet.errors import BlobError, GpunetError, KernelError, NetError
from gpunet.kernels import Kernel, KernelContext, RunState, find
from gpunet.net import check_order
from gpunet.operator import Operator
from gpunet.proto import DeviceOption, NetDef
from gpunet.specs import BlobSpec, TensorSpec

if TYPE_CHECKING:
    from gpunet.workspace import Workspace

log = logging.getLogger("gpunet")

#: Net types of Caffe2. All of them run in order here.
NET_TYPES = frozenset(
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

#: How many combinations of input shapes a segment remembers the inferred shapes of.
_MAX_CACHED_SHAPES = 256


class Step(NamedTuple):
    """One bound operator: ``function(*arguments)`` does its work."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    op: Operator


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
        self.kernels = [_find_kernel(op, workspace.device) for op in self.operators]
        self._contexts = self._make_contexts()
        self._scratch = aligned_bytes(0)
        self._segments = self._cut()

    def run(self) -> None:
        """Runs all operators once. An error names the operator; blobs written before it keep their new values."""
        workspace = self.workspace
        with np.errstate(all="ignore"):
            for segment in self._segments:
                if segment.epoch != workspace.epoch:
                    segment.bind()
                segment.run()
        self.state.step += 1

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

    def _cut(self) -> list[Segment]:
        segments: list[Segment] = []
        start = 0
        for index, op in enumerate(self.operators):
            if op.dynamic:
                if start < index:
                    segments.append(StaticSegment(self, start, index))
                segments.append(DynamicSegment(self, index))
                start = index + 1
        if start < len(self.operators):
            segments.append(StaticSegment(self, start, len(self.operators)))
        return segments

    def scratch(self, wanted: Sequence[Sequence[TensorSpec]]) -> list[tuple[npt.NDArray[Any], ...]]:
        """Arrays for the scratch of each of several operators. They share memory: only one operator runs at a time."""
        offsets = [_offsets(specs) for specs in wanted]
        size = max((o[-1] for o in offsets), default=0)
        if size > self._scratch.nbytes:
            self._scratch = aligned_bytes(size)
        memory = self._scratch
        return [
            tuple(memory[at : at + s.nbytes].view(s.dtype).reshape(s.shape) for at, s in zip(places, specs))
            for places, specs in zip(offsets, wanted)
        ]


class Segment(ABC):
    """A run of operators of a program that is bound together."""

    def __init__(self) -> None:
        #: The workspace's epoch at which the bindings were last known to hold.
        self.epoch = -1

    @abstractmethod
    def bind(self) -> None:
        """Makes the segment ready to run on the blobs as they are now."""

    @abstractmethod
    def run(self) -> None:
        """Runs the segment once."""


class StaticSegment(Segment):
    """Operators whose output shapes follow from input shapes."""

    def __init__(self, program: Program, start: int, stop: int) -> None:
        super().__init__()
        self._program = program
        self._range = range(start, stop)
        self._steps: list[Step] = []
        self._initial: dict[str, Any] = {}
        self._final: dict[str, Any] = {}
        self._inferred: dict[tuple[Any, ...], list[list[BlobSpec | None]]] = {}

    def run(self) -> None:
        op: Operator | None = None
        try:
            for function, arguments, op in self._steps:
                function(*arguments)
        except Exception as error:
            _blame(error, op)

    def bind(self) -> None:
        workspace = self._program.workspace
        if not self._holds(workspace):
            self._bind(workspace)
        # Where a run leaves another shape in a blob that it starts from, the next run starts from that one.
        changed = any(self._final.get(name, value) is not value for name, value in self._initial.items())
        self.epoch = -1 if changed else workspace.epoch

    def _holds(self, workspace: Workspace) -> bool:
        return bool(self._steps) and all(
            workspace.value(name) is value for name, value in [*self._initial.items(), *self._final.items()]
        )

    def _bind(self, workspace: Workspace) -> None:
        self._steps = []
        operators = [self._program.operators[i] for i in self._range]
        values, specs = self._read_inputs(workspace, operators)
        self._initial = dict(values)
        inferred = self._infer(operators, specs)
        bound = []
        self._final = {}
        for op, output_specs in zip(operators, inferred):
            inputs = tuple(values[name] for name in op.inputs)
            outputs = tuple(_output(workspace, op, o, inputs, s) for o, s in enumerate(output_specs))
            written = dict(zip(op.outputs, outputs))
            values.update(written)
            self._final.update(written)
            bound.append((inputs, outputs))
        self._steps = self._make_steps(operators, bound)

    def _read_inputs(
        self, workspace: Workspace, operators: Sequence[Operator]
    ) -> tuple[dict[str, Any], dict[str, BlobSpec | None]]:
        values: dict[str, Any] = {}
        specs: dict[str, BlobSpec | None] = {}
        made: set[str] = set()
        for op in operators:
            for i, name in enumerate(op.inputs):
                if name not in made and name not in values:
                    values[name] = _read(workspace, op, i)
                    specs[name] = workspace.spec(name)
            made.update(op.outputs)
        return values, specs

    def _infer(
        self, operators: Sequence[Operator], specs: dict[str, BlobSpec | None]
    ) -> list[list[BlobSpec | None]]:
        key = tuple(specs.items())
        found = self._inferred.get(key)
        if found is None:
            found = []
            for op in operators:
                outputs = op.infer([specs[name] for name in op.inputs])
                specs.update(zip(op.outputs, outputs))
                found.append(outputs)
            if len(self._inferred) >= _MAX_CACHED_SHAPES:
                self._inferred.clear()
            self._inferred[key] = found
        return found

    def _make_steps(
        self, operators: Sequence[Operator], bound: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]
    ) -> list[Step]:
        program = self._program
        kernels = [program.kernels[i] for i in self._range]
        scratch = program.scratch([_wanted_scratch(op, k, *b) for op, k, b in zip(operators, kernels, bound)])
        steps = []
        for index, op, kernel, (inputs, outputs), room in zip(
            self._range, operators, kernels, bound, scratch
        ):
            context = program._contexts[index]
            context.scratch = room
            arguments = (inputs, outputs, op.args, context)
            if kernel.binds:
                try:
                    steps.append(Step(kernel.function(*arguments), (), op))
                except Exception as error:
                    _blame(error, op)
            else:
                steps.append(Step(kernel.function, arguments, op))
        return steps


class DynamicSegment(Segment):
    """One operator that returns fresh values, because their shapes depend on data or they are no tensors."""

    def __init__(self, program: Program, index: int) -> None:
        super().__init__()
        self._workspace = program.workspace
        self._op = program.operators[index]
        self._kernel = program.kernels[index]
        self._context = program._contexts[index]

    def bind(self) -> None:
        self.epoch = self._workspace.epoch

    def run(self) -> None:
        op, workspace = self._op, self._workspace
        inputs = tuple(_read(workspace, op, i) for i in range(len(op.inputs)))
        op.infer([workspace.spec(name) for name in op.inputs])
        try:
            values = self._kernel.function(inputs, (), op.args, self._context)
            if self._kernel.binds:
                values = values()
        except Exception as error:
            _blame(error, op)
        for name, value in zip(op.outputs, values):
            workspace.put(name, value)


def _with_device(net: NetDef, op: Any) -> Any:
    if not net.HasField("device_option") or op.HasField("device_option"):
        return op
    copy = type(op)()
    copy.CopyFrom(op)
    copy.device_option.CopyFrom(net.device_option)
    return copy


_reported: set[str] = set()


def _find_kernel(op: Operator, device: Device) -> Kernel:
    option: DeviceOption = op.definition.device_option
    wanted = requested_device(option) if op.definition.HasField("device_option") else None
    if wanted is not None and wanted.kind != device.kind and str(wanted) not in _reported:
        _reported.add(str(wanted))
        log.warning(
            "%s asks for device %s, which this workspace does not have: running on %s",
            op.where,
            wanted,
            device,
        )
    try:
        return find(op, device.kind)
    except GpunetError as error:
        raise error.locate(op.where) from None


def _read(workspace: Workspace, op: Operator, index: int) -> Any:
    name = op.inputs[index]
    value = workspace.value(name)
    if value is EMPTY:
        state = "holds nothing yet" if workspace.has(name) else "does not exist"
        declared = op.schema.input_at(index).name
        raise BlobError(
            f"input {declared}: blob {name!r} {state}, wanted one that was fed or made before"
        ).locate(op.where)
    return value


def _output(
    workspace: Workspace, op: Operator, index: int, inputs: tuple[Any, ...], spec: BlobSpec | None
) -> Any:
    name = op.outputs[index]
    if not isinstance(spec, TensorSpec):
        raise KernelError(
            f"output {name!r} is {spec}, wanted a tensor from an operator that is not dynamic"
        ).locate(op.where)
    if name in op.inputs:
        array = inputs[op.inputs.index(name)]
        if (array.shape, array.dtype) != (spec.shape, spec.dtype):
            array = array.reshape(-1).view(spec.dtype).reshape(spec.shape)
            workspace.replace(name, array)
        return array
    return workspace.allocate(name, spec)


def _wanted_scratch(
    op: Operator, kernel: Kernel, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Sequence[TensorSpec]:
    if kernel.scratch is None:
        return ()
    return kernel.scratch(op, [_spec(x) for x in inputs], [_spec(y) for y in outputs])


def _spec(value: Any) -> TensorSpec | None:
    return TensorSpec(value.shape, value.dtype) if isinstance(value, np.ndarray) else None


def _offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor starts in a block that holds them all, and, last, the size of the block in bytes."""
    offsets = [0]
    for s in specs:
        offsets.append(offsets[-1] + -(-s.nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets


def _blame(error: Exception, op: Operator | None) -> NoReturn:
    where = op.where if op is not None else ""
    if isinstance(error, GpunetError):
        raise error.locate(where)
    raise KernelError(f"the kernel failed: {type(error).__name__}: {error}").locate(where) from error

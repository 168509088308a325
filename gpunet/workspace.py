"""The workspace: named blobs, and the nets that run on them."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpunet.backends import Backend, Event, backend
from gpunet.blobs import EMPTY, Blob, QuantizedTensor, as_value, spec_of
from gpunet.devices import CPU, Device, parse_device
from gpunet.errors import ArgumentError, BlobError, DataTypeError, NetError
from gpunet.kernels import RunState, load
from gpunet.net import Net, NetLike, as_net_def, class_of
from gpunet.options import Options, options_of
from gpunet.program import Program
from gpunet.proto import NetDef, OperatorDef
from gpunet.specs import BlobSpec, TensorSpec

_HOST: Final = frozenset([CPU])


class Workspace:
    """Holds named blobs and runs nets on them.

    Args:
        device: ``"auto"`` (the best that is available), ``"cpu"``, ``"cuda:N"`` or ``"sim:N"``.
        seed: the key of all random draws, together with the operator and how often its net has run; any whole
            number.
        strict: whether an operator without a kernel for the device is an error, rather than run on the CPU.

    Raises:
        DeviceError: there is no such device here.
        ArgumentError: ``seed`` is no whole number.
    """

    def __init__(self, device: str | Device = "auto", *, seed: int = 0, strict: bool = False) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ArgumentError(f"seed is {seed!r}, wanted a whole number")
        self.device = parse_device(device)
        load(self.device.kind)
        if self.device != CPU:
            backend(self.device)
        self.seed = int(seed)
        self.strict = strict
        #: Counts the times that any blob was given another buffer, shape or type: bound programs compare it.
        self.epoch = 0
        self._blobs: dict[str, Blob] = {}
        self._programs: dict[str, Program] = {}
        self._states: dict[str, RunState] = {}
        #: Blobs that a net computes without keeping them, and the net.
        self._hidden: dict[str, str] = {}
        self._running = threading.Lock()

    # Blobs, from outside

    def feed(self, name: str, value: Any) -> None:
        """Copies ``value`` into the blob ``name``, which is made if it does not exist.

        Args:
            name: the blob.
            value: an array of any type in ``gpunet.dtypes``, numbers or nested lists of them, a
                ``TensorProto``, ``str`` or ``bytes``, a :class:`gpunet.QuantizedTensor`; anything else is
                kept as an opaque object.

        Raises:
            BlobError: ``name`` cannot name a blob.
            DataTypeError: an array of a type that tensors cannot have; a quantised tensor of another type
                than int8, uint8 or int32.
            ShapeError: nested lists of unequal lengths.
        """
        if not isinstance(name, str) or not name:
            raise BlobError(f"cannot feed a blob named {name!r}, wanted a text that is not empty")
        value = as_value(name, value)
        if isinstance(value, np.ndarray):
            spec = TensorSpec(value.shape, value.dtype)
            np.copyto(self.allocate(name, spec), value)
            self._blobs[name].commit(spec, _HOST)
        elif isinstance(value, QuantizedTensor):
            data = np.array(value.data)
            if data.dtype not in (np.int8, np.uint8, np.int32) or not value.scale > 0:
                raise DataTypeError(
                    f"cannot feed blob {name!r}: the quantised tensor is {data.dtype} with "
                    f"scale {value.scale!r}, "
                    "wanted int8, uint8 or int32 and a scale above 0"
                )
            self.replace(name, QuantizedTensor(data, float(value.scale), int(value.zero_point)))
        else:
            self.replace(name, value)

    def feed_to(self, target: Backend, name: str, value: npt.NDArray[Any]) -> Event:
        """Copies an array in memory of ``target.pinned`` into a blob on that device, without waiting.

        The array must stay as it is until the event has come. Only the copy of the blob on the device is
        valid then.
        """
        spec = TensorSpec(value.shape, value.dtype)
        buffer = self.allocate(name, spec, target.device)
        event = target.copy_later(buffer, value, target.stream)
        self._blobs[name].commit(spec, frozenset([target.device]))
        return event

    def fetch(self, name: str) -> Any:
        """A copy of what the blob holds: an array (``object`` arrays of ``bytes`` for string tensors),
        ``bytes``, a :class:`gpunet.QuantizedTensor`, or the opaque object itself.

        Waits for the device where the value is there. Raises :class:`BlobError` if there is nothing.
        """
        value = self.value(name)
        if value is EMPTY:
            raise BlobError(f"cannot fetch: {self.absence(name)}")
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, QuantizedTensor):
            return QuantizedTensor(value.data.copy(), value.scale, value.zero_point)
        return value

    def has(self, name: str) -> bool:
        """Whether the blob exists."""
        return name in self._blobs

    def blobs(self) -> list[str]:
        """Names of all blobs, sorted."""
        return sorted(self._blobs)

    def remove(self, name: str) -> None:
        """Forgets a blob; nets that use it will miss it. Raises :class:`BlobError` if it does not exist."""
        if self._blobs.pop(name, None) is None:
            raise BlobError(f"cannot remove blob {name!r}: it does not exist")
        self._hidden.pop(name, None)
        self.epoch += 1

    def reset(self) -> None:
        """Forgets all blobs, nets and random positions."""
        with self._exclusively("reset the workspace"):
            self._blobs.clear()
            self._programs.clear()
            self._states.clear()
            self._hidden.clear()
            self.epoch += 1

    # Nets

    def run_operator(self, op: OperatorDef | bytes) -> None:
        """Runs one operator on the blobs of this workspace.

        Raises :class:`NetError` for what is no operator definition, and whatever the operator raises.
        """
        if isinstance(op, bytes):
            from gpunet.serialization import parse

            op = parse(OperatorDef, op, what="operator")
        if not isinstance(op, OperatorDef):
            raise NetError(
                f"found {class_of(op)} as an operator, wanted an OperatorDef of gpunet or its bytes "
                "(run_once runs nets)"
            )
        self._run(Program(NetDef(op=[op]), self, self._state(""), Options()))

    def run_once(self, net: NetLike) -> None:
        """Runs a net once without keeping it."""
        definition = as_net_def(net)
        self._run(Program(definition, self, self._state(definition.name), options_of(definition)))

    def create(
        self,
        net: NetLike,
        *,
        overwrite: bool = False,
        engine: str | None = None,
        workers: int | None = None,
        streams: int | None = None,
        keep: Collection[str] | None = None,
        without: Collection[str] = (),
        recompute: int | None = None,
    ) -> str:
        """Makes a net ready to run and keeps it under its name, which is returned.

        Args:
            net: the net; a copy is kept.
            overwrite: whether a net of this name may be replaced.
            engine: ``simple``, ``async_scheduling``, ``graph`` or a net type of Caffe2; by default the net's
                type.
            workers: CPU threads of ``async_scheduling``; by default the net's ``num_workers``, else one a
                core.
            streams: streams on a GPU.
            keep: blobs to be fetched after a run, beside those that the net reads and writes; the others
                share memory and cannot be fetched. By default the net's external outputs if it declares any,
                else all blobs.
            without: names of passes to switch off (``gpunet.passes.pipeline``).
            recompute: compute activations again for the backward pass instead of keeping them, in this many
                segments of the net; 0 chooses a number.

        Raises:
            NetError: a net of this name exists (and ``overwrite`` is not set), or the net is not well formed.
            SchemaError, ArgumentError, DeviceError: an operator is not right, located at the operator.
        """
        definition = as_net_def(net)
        if definition.name in self._programs and not overwrite:
            raise NetError(
                f"a net named {definition.name!r} exists already, wanted another name or overwrite=True"
            )
        copy = NetDef()
        copy.CopyFrom(definition)
        options = options_of(
            copy,
            engine=engine,
            workers=workers,
            streams=streams,
            keep=keep,
            without=without,
            recompute=recompute,
        )
        self._programs[copy.name] = Program(copy, self, self._state(copy.name), options)
        return copy.name

    def run(self, name: str | Net, n: int = 1) -> None:
        """Runs a created net ``n`` times. Raises :class:`NetError` if there is none of this name."""
        key = name.name if isinstance(name, Net) else name
        program = self.program(key)
        if not isinstance(n, (int, np.integer)) or n < 0:
            raise NetError(f"net {key!r} was to run {n!r} times, wanted a whole number, 0 or more")
        for _ in range(n):
            self._run(program)

    def program(self, name: str) -> Program:
        """The compiled form of a created net; raises :class:`NetError` if there is none of this name."""
        program = self._programs.get(name)
        if program is None:
            known = ", ".join(map(repr, sorted(self._programs))) or "none"
            raise NetError(f"there is no net named {name!r}, wanted one that was created: {known}")
        return program

    def nets(self) -> list[str]:
        """Names of the nets that were created, sorted."""
        return sorted(self._programs)

    # Random positions, for checkpoints

    def steps(self) -> dict[str, int]:
        """How often each net has run: with the seed, the whole state of the random generator."""
        return {name: state.step for name, state in self._states.items()}

    def restore_steps(self, steps: dict[str, int]) -> None:
        """Sets what :meth:`steps` gave."""
        for name, step in steps.items():
            self._state(name).step = int(step)

    # Blobs, for programs

    def value(self, name: str) -> Any:
        """What the blob holds, on the host, itself and not a copy; ``gpunet.blobs.EMPTY`` if nothing or if
        there is no such blob.
        """
        blob = self._blobs.get(name)
        if blob is None or not blob.valid:
            return EMPTY
        self.bring(name, CPU)
        return blob.slots[CPU].storage

    def spec(self, name: str) -> BlobSpec | None:
        """Shape and type of the blob; ``None`` if it holds nothing."""
        blob = self._blobs.get(name)
        return None if blob is None else blob.spec

    def blob(self, name: str) -> Blob:
        """The blob itself, made empty if there is none."""
        found = self._blobs.get(name)
        if found is None:
            found = self._blobs[name] = Blob(name)
        return found

    def hide(self, name: str, net: str) -> None:
        """Notes that a net computes the blob and does not keep it; what the blob held before is gone."""
        self._hidden[name] = net
        blob = self._blobs.get(name)
        if blob is None or blob.spec is None:
            return
        for slot in blob.slots.values():
            slot.set(EMPTY, None)
        blob.commit(None, frozenset())
        # Nets that keep it are bound to what it had.
        self.epoch += 1

    def absence(self, name: str) -> str:
        """Why a blob holds nothing, and what to do about it."""
        if name in self._hidden:
            advice = f"name it in external_output, or create the net with keep=[{name!r}]"
            return (
                f"blob {name!r} is internal to net {self._hidden[name]!r}, which does not keep it: {advice}"
            )
        state = "holds nothing yet" if name in self._blobs else "does not exist"
        return f"blob {name!r} {state}, wanted one that was fed or made by a net"

    def storage(self, name: str, device: Device) -> Any:
        """What the blob has on a device, valid or stale; ``EMPTY`` if nothing."""
        blob = self._blobs.get(name)
        slot = None if blob is None else blob.slots.get(device)
        return EMPTY if slot is None else slot.storage

    def allocate(self, name: str, spec: TensorSpec, device: Device = CPU) -> Any:
        """The blob's storage on a device with this shape and type; its elements are whatever was there."""
        slot = self.blob(name).slot(device)
        before = slot.storage
        storage = slot.allocate(spec, device, name)
        if storage is not before:
            self.epoch += 1
        return storage

    def set_storage(self, name: str, storage: Any, spec: BlobSpec | None, device: Device = CPU) -> None:
        """Makes the blob's slot on a device hold this very storage."""
        self.blob(name).slot(device).set(storage, spec)
        self.epoch += 1

    def bring(self, name: str, device: Device, target: Any = None) -> None:
        """Copies the blob's value to a device unless it is there.

        From another device than the host it goes by way of the host. ``target`` is the storage to copy to
        where that is not the blob's present one on the device: a net that leaves another shape in a blob
        than it reads is bound to both.
        """
        blob = self._blobs[name]
        if device in blob.valid or not isinstance(blob.spec, TensorSpec):
            return
        if target is None:
            target = self.allocate(name, blob.spec, device)
        if device == CPU:
            source = blob.slots[next(iter(blob.valid))].storage
            source.backend.copy_out(target, source, source.backend.stream)
        else:
            self.bring(name, CPU)
            target.backend.copy_in(target, blob.slots[CPU].storage, target.backend.stream)
        if target is blob.slots[device].storage:
            blob.valid |= {device}

    def replace(self, name: str, value: Any) -> None:
        """Makes the blob hold ``value`` itself, on the host."""
        spec = spec_of(value)
        self.set_storage(name, value, spec)
        self._blobs[name].commit(spec, _HOST)

    def put(self, name: str, value: Any) -> None:
        """Takes over a fresh value; an array is copied where the blob has one of this shape and type, so that
        bindings hold.
        """
        if not isinstance(value, np.ndarray):
            self.replace(name, value)
            return
        spec = TensorSpec(value.shape, value.dtype)
        slot = self.blob(name).slot(CPU)
        if slot.spec == spec:
            np.copyto(slot.storage, value)
            self._blobs[name].commit(spec, _HOST)
        else:
            self.replace(name, np.ascontiguousarray(value).reshape(value.shape))

    def _state(self, name: str) -> RunState:
        return self._states.setdefault(name, RunState())

    def _run(self, program: Program) -> None:
        with self._exclusively(f"run net {program.name!r}"):
            program.run()

    def _exclusively(self, what: str) -> _Exclusive:
        return _Exclusive(self._running, what)

    def __repr__(self) -> str:
        return f"Workspace({str(self.device)!r}, {len(self._blobs)} blobs, {len(self._programs)} nets)"


class _Exclusive:
    """Holds a lock, or refuses at once: two nets of one workspace share scratch and blobs, so they do not run
    at the same time.
    """

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self._lock = lock
        self._what = what

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise NetError(
                f"cannot {self._what}: another net of this workspace is running, wanted one at a time"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

"""What the runtime asks of a device other than the host: memory, copies, streams, events, launches.

``cuda:N`` (through CuPy) and ``sim:N`` (the simulated device) implement :class:`Backend`; both run the same
kernels, registered for the device kind ``cuda``. All work is put on streams and runs later, in the order of
its stream; nothing but an event orders two streams.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpunet.devices import Device
from gpunet.errors import DeviceError

if TYPE_CHECKING:
    from gpunet.buffers import Buffer


class Memory:
    """A block of device memory.

    ``pointer`` is an address of the device; the block is given back when the object dies. ``name`` is that of
    the first blob in it, for messages.
    """

    __slots__ = ("_release", "name", "nbytes", "pointer")

    def __init__(self, pointer: int, nbytes: int, release: Callable[[], None]) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.name = ""
        self._release = release

    def used_on(self, stream: Stream) -> None:
        """Notes that work on another stream than the one it was allocated for uses the block: it is not
        handed out again before that is done.
        """

    def __del__(self) -> None:
        self._release()


class Event(ABC):
    """A point in a stream that others can wait for."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before the point has run; never waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits on the host until all work before the point has run."""


class Stream(ABC):
    """A queue of work of one device."""

    @property
    def capturing(self) -> bool:
        """Whether what is put into the queue is recorded into a graph instead of being run."""
        return False

    @abstractmethod
    def record(self) -> Event:
        """An event behind all work that is in the queue now."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work put into the queue from now on runs after the event."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits on the host until the queue is empty; raises the first error of its work, located at its
        kernel.
        """


class Reached(NamedTuple):
    """Buffers that a launch reads and writes through addresses in memory, not as its arguments."""

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]


class Function(ABC):
    """A kernel of a loaded module, ready to launch."""

    @abstractmethod
    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        params: Any,
        stream: Stream,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Puts one launch on a stream.

        Args:
            grid: numbers of blocks.
            block: numbers of threads in a block.
            shared: bytes of dynamic shared memory in a block.
            params: a ctypes array of pointers to the arguments, which must live until the launch has run (the
                caller keeps them as long as the program).
            stream: where it runs.
            arguments: the buffers and numbers behind ``params``, one a parameter, for messages and checks;
                a :class:`Reached` may follow them.
        """


class Backend(ABC):
    """One device."""

    device: Device

    @abstractmethod
    def allocate(self, nbytes: int, stream: Stream | None = None) -> Memory:
        """Uninitialised memory, aligned to 256 bytes, for use on ``stream`` (by default :attr:`stream`).

        Raises :class:`DeviceError` if there is none, after one retry with emptied caches.
        """

    @property
    @abstractmethod
    def stream(self) -> Stream:
        """The stream that the simple engine runs on."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A further stream."""

    @abstractmethod
    def copy_in(self, target: Buffer, source: npt.NDArray[Any], stream: Stream) -> None:
        """Copies a C-contiguous host array to the device, in stream order.

        ``source`` may be changed as soon as this returns.
        """

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory for :meth:`copy_later` and :meth:`copy_back`; page-locked where the device has a use
        for that.
        """
        return np.empty(nbytes, np.uint8)

    def copy_later(self, target: Buffer, source: npt.NDArray[Any], stream: Stream) -> Event:
        """Copies a C-contiguous array in memory of :meth:`pinned` to the device, in stream order.

        It does not wait: ``source`` must stay as it is until the event has come.
        """
        self.copy_in(target, source, stream)
        return stream.record()

    @abstractmethod
    def copy_out(self, target: npt.NDArray[Any], source: Buffer, stream: Stream) -> None:
        """Copies to a C-contiguous host array and waits: the array holds the values when this returns."""

    def copy_back(self, target: npt.NDArray[Any], source: Buffer, stream: Stream) -> None:
        """As :meth:`copy_out`, to a C-contiguous array in memory of :meth:`pinned`."""
        self.copy_out(target, source, stream)

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer, stream: Stream) -> None:
        """Copies between two contiguous buffers of one size, in stream order."""

    @abstractmethod
    def fill(self, target: Buffer, byte: int, stream: Stream) -> None:
        """Sets every byte, in stream order."""

    @abstractmethod
    def function(self, module: str, name: str) -> Function:
        """The kernel ``name`` of ``cuda_kernels/<module>.cu``, compiled and loaded once."""

    @abstractmethod
    def call_host(
        self, function: Callable[..., None], buffers: Sequence[Buffer], stream: Stream, reads: int = 0
    ) -> None:
        """Runs ``function`` on arrays that are the memory of ``buffers``, in stream order.

        The first ``reads`` of them are only read.

        Only the simulated device can; it stands in for libraries (cuDNN, cuBLAS) there. Elsewhere it raises
        :class:`DeviceError`.
        """

    @abstractmethod
    def capture(self, issue: Callable[[], None], stream: Stream) -> Callable[[], None]:
        """Records the work that ``issue`` puts on ``stream``, and on streams that it makes wait for that one,
        as one graph.

        The work does not run. Side streams must be joined again before ``issue`` returns. Returns a function
        that puts all of it on ``stream`` with one launch, as often as it is called; buffers and arguments
        stay those of the recording.

        Raises:
            DeviceError: something was asked for that a graph cannot hold, such as a copy from or to the host.
        """

    @property
    def simulated(self) -> bool:
        """Whether this is the simulated device."""
        return self.device.kind == "sim"

    def memory_info(self) -> tuple[int, int]:
        """(bytes free, bytes in all) on the device; zeros where it has no limit."""
        return (0, 0)


def check_copy(buffer: Buffer, array: npt.NDArray[Any], *, written: bool = False) -> None:
    """Raises :class:`DeviceError` unless a host array has as many bytes as a buffer and, where it is written,
    can be written as it lies in memory.
    """
    if buffer.nbytes != array.nbytes:
        raise DeviceError(
            f"copy between {buffer} of {buffer.nbytes} bytes and {array.nbytes} bytes, wanted the same number"
        )
    if written and not (array.flags.c_contiguous and array.flags.writeable):
        raise DeviceError(f"cannot copy {buffer} to an array that is not contiguous and writeable")


_MODULES: Final = {"cuda": "gpunet.cuda_kernels.cuda_backend", "sim": "gpunet.cuda_kernels.sim_backend"}
_open: dict[Device, Backend] = {}


def backend(device: Device) -> Backend:
    """The backend of a device, made on first use.

    Raises :class:`DeviceError` with what is missing and how to get it.
    """
    found = _open.get(device)
    if found is None:
        module = _MODULES.get(device.kind)
        if module is None:
            raise DeviceError(f"device {device} has no backend, wanted one of kind {', '.join(_MODULES)}")
        found = _open[device] = importlib.import_module(module).open_backend(device)
    return found


def opened() -> list[Backend]:
    """The backends that were made so far."""
    return list(_open.values())

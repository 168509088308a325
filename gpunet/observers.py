"""Observers: what is called before and after each operator of a net that runs.

They are put around the steps of a program when it is bound, so that a net without observers pays nothing for
them. Every engine takes them; the engine ``graph`` issues its work one step at a time while there are any,
since a graph that is replayed knows no steps.

::

    with observers.observe(workspace, "net", after=lambda call: print(call.type, call.outputs())):
        workspace.run("net")

On a GPU an observer is called when the work was put on the stream, not when it has run;
:meth:`Call.fetch_outputs` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpunet.blobs import spec_of
from gpunet.buffers import Buffer
from gpunet.engines import Step
from gpunet.graph import Node, Value
from gpunet.net import Net
from gpunet.specs import BlobSpec

if TYPE_CHECKING:
    from gpunet.program import Program
    from gpunet.workspace import Workspace


@dataclass(frozen=True, eq=False)
class Call:
    """One bound operator, or one copy between devices, as observers see it.

    The same object is passed in every run until the net is bound to other buffers.

    Attributes:
        step: what runs: its ``node``, ``lane`` and ``stream``, and the positions that it waits for.
        segment: position in the net of the first operator of its segment.
        position: position in the schedule of the segment.
    """

    step: Step
    segment: int
    position: int
    read: Callable[[Value], Any]

    @property
    def node(self) -> Node:
        """The operator with its values."""
        return self.step.node

    @property
    def type(self) -> str:
        """The operator's type; ``copy`` for a copy between devices."""
        return "copy" if self.node.op is None else self.node.op.type

    @property
    def name(self) -> str:
        """The name in the definition, else that of the first output."""
        if self.node.op is not None and self.node.op.definition.name:
            return self.node.op.definition.name
        return self.node.outputs[0].name if self.node.outputs else ""

    @property
    def where(self) -> str:
        """How messages name it: ``[Conv] op 12 'res2a' in net 'resnet50'``."""
        return self.node.where

    def inputs(self) -> list[Any]:
        """Storage of the inputs: arrays on the host, buffers elsewhere, other objects as they are."""
        return [self.read(value) for value in self.node.inputs]

    def outputs(self) -> list[Any]:
        """Storage of the outputs. Before the operator has run it holds anything."""
        return [self.read(value) for value in self.node.outputs]

    def fetch_inputs(self) -> list[Any]:
        """The inputs on the host; those on a device are copied, which waits for them.

        After the operator has run, inputs that its outputs were written to are gone.
        """
        return [self._fetch(storage) for storage in self.inputs()]

    def fetch_outputs(self) -> list[Any]:
        """The outputs on the host; those on a device are copied, which waits for them."""
        return [self._fetch(storage) for storage in self.outputs()]

    def specs(self) -> tuple[list[BlobSpec | None], list[BlobSpec | None]]:
        """Specs of inputs and outputs; ``None`` for what does not exist yet."""
        return [_spec(s) for s in self.inputs()], [_spec(s) for s in self.outputs()]

    def _fetch(self, storage: Any) -> Any:
        if not isinstance(storage, Buffer):
            return storage
        array = np.empty(storage.shape, storage.dtype)
        storage.backend.copy_out(array, storage, self.step.stream or storage.backend.stream)
        return array


def _spec(storage: Any) -> BlobSpec | None:
    return storage.spec if isinstance(storage, Buffer) else spec_of(storage)


class Observer:
    """Base of observers; each method does nothing unless it is overridden.

    With ``async_scheduling`` the methods are called from the threads of all CPU lanes, at the same time. What
    they raise ends the run like an error of the operator.
    """

    def before(self, call: Call) -> None:
        """The operator is about to run: its inputs are there."""

    def after(self, call: Call) -> None:
        """The operator has run, or was put on its stream."""

    def failed(self, call: Call) -> None:
        """The operator, or an observer after it, has raised."""


class _Functions(Observer):
    """An observer of two functions."""

    def __init__(self, before: Callable[[Call], None] | None, after: Callable[[Call], None] | None) -> None:
        self._before, self._after = before, after

    def before(self, call: Call) -> None:
        if self._before is not None:
            self._before(call)

    def after(self, call: Call) -> None:
        if self._after is not None:
            self._after(call)


def attach(program: Program, observer: Observer) -> None:
    """Has an observer called in every run of a program, inside of those that it has already."""
    program.observers = (*program.observers, observer)


def detach(program: Program, observer: Observer) -> None:
    """Takes an observer away; nothing happens if it is not there."""
    program.observers = tuple(other for other in program.observers if other is not observer)


@contextmanager
def observe(
    workspace: Workspace,
    net: str | Net,
    *observers: Observer,
    before: Callable[[Call], None] | None = None,
    after: Callable[[Call], None] | None = None,
) -> Iterator[None]:
    """Observes a created net as long as the block lasts.

    Args:
        workspace: where the net was created.
        net: the net.
        observers: observers.
        before: a function that is called before each operator.
        after: a function that is called after each operator.

    Raises:
        NetError: there is no net of this name.
    """
    program = workspace.program(net.name if isinstance(net, Net) else net)
    added = [*observers, *([_Functions(before, after)] if before or after else [])]
    for observer in added:
        attach(program, observer)
    try:
        yield
    finally:
        for observer in added:
            detach(program, observer)


def observed(
    steps: Sequence[Step], observers: Sequence[Observer], read: Callable[[Value], Any], segment: int
) -> list[Step]:
    """The steps with observers around them; the same steps where there are none.

    Args:
        steps: in the order of the schedule.
        observers: the first is called first before a step, and last after it.
        read: the storage of a value.
        segment: position in the net of the first operator of the segment.
    """
    if not observers:
        return list(steps)
    return [
        _wrapped(step, Call(step, segment, position, read), tuple(observers))
        for position, step in enumerate(steps)
    ]


def _wrapped(step: Step, call: Call, observers: tuple[Observer, ...]) -> Step:
    function, arguments = step.function, step.arguments
    inside_out = observers[::-1]

    def run() -> None:
        begun = []
        try:
            for observer in observers:
                observer.before(call)
                begun.append(observer)
            function(*arguments)
            for observer in inside_out:
                observer.after(call)
                begun.pop()
        except BaseException:
            for observer in reversed(begun):
                observer.failed(call)
            raise

    return replace(step, function=run, arguments=())

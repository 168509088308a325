"""The finder of NaN and infinity: names the first operator with an output that is not finite.

::

    gpunet.nan_check.watch(workspace)   # all nets that were created
    workspace.run("train")              # KernelError: [Log] op 7 'h' in net 'train': output Y 'h' ...

It looks at every float output of every operator right after it has run, on every engine and device, and so
costs about as much as copying them all to the host. Where two operators of different lanes give bad outputs
in the same run, either may be named. Of a fused operator it sees what comes out at the end; where that is
bad, it computes the operators of the group one by one to tell which it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.blobs import spec_of
from gpunet.dtypes import is_bfloat16, is_float
from gpunet.errors import KernelError
from gpunet.observers import Call, Observer, attach
from gpunet.operator import Operator
from gpunet.workspace import Workspace


class NanFinder(Observer):
    """Raises :class:`KernelError`, located at the operator, where an output holds NaN or infinity."""

    def __init__(self) -> None:
        #: Copies of the inputs that the operator in hand overwrites, one set a thread.
        self._local = threading.local()

    def before(self, call: Call) -> None:
        """Keeps what the operator is about to overwrite."""
        node = call.node
        overwritten = node.overwrites
        self._local.kept = [
            np.array(value) if member in overwritten and isinstance(value, np.ndarray) else None
            for member, value in zip(node.inputs, self._overwritable(call, overwritten), strict=True)
        ]

    def after(self, call: Call) -> None:
        """Checks the outputs."""
        outputs = call.fetch_outputs()
        for index, value in enumerate(outputs):
            if is_bad(value):
                raise KernelError(self._report(call, index, value)).locate(call.where)

    @staticmethod
    def _overwritable(call: Call, overwritten: set[Any]) -> list[Any]:
        """The inputs on the host; only those that are overwritten are fetched."""
        if not overwritten.intersection(call.node.inputs):
            return [None] * len(call.node.inputs)
        return call.fetch_inputs()

    def _report(self, call: Call, index: int, value: npt.NDArray[Any]) -> str:
        op, node = call.node.op, call.node
        declared = "" if op is None else f"{op.schema.output_at(index).name} "
        before = [
            kept if kept is not None else found
            for kept, found in zip(self._local.kept, call.fetch_inputs(), strict=True)
        ]
        parts = [f"output {declared}{describe(node.outputs[index].name, value)}"]
        parts += [
            f"input {describe(member.name, found)}" for member, found in zip(node.inputs, before, strict=True)
        ]
        if op is not None and op.type == "FusedElementwise":
            parts += _inside(op, before)
        return "; ".join(parts)


def _inside(op: Operator, inputs: Sequence[Any]) -> list[str]:
    """What is wrong inside of a fused operator: its operators one by one, on the CPU."""
    workspace = Workspace("cpu")
    body, rank = op.args.body, len(op.args.shape)
    for number, (name, value) in enumerate(zip(body.external_input, inputs, strict=True)):
        workspace.feed(name, value.reshape(op.args.operands[rank * number : rank * (number + 1)]))
    workspace.create(body, without=["fusion"])
    watch(workspace)
    try:
        workspace.run(body.name)
    except KernelError as error:
        return [f"inside of it: {error}"]
    return []


def watch(workspace: Workspace) -> None:
    """Has all nets that were created in a workspace checked, in every run from now on."""
    for name in workspace.nets():
        attach(workspace.program(name), NanFinder())


def is_bad(value: Any) -> bool:
    """Whether it is a tensor of floats with a NaN or an infinity."""
    return isinstance(value, np.ndarray) and is_float(value.dtype) and not bool(np.isfinite(value).all())


def describe(name: str, value: Any) -> str:
    """A tensor in a line: ``'h' (float32 8x4) has 2 of 32 elements that are not finite (1 NaN, 1 infinite),
    the first at [0, 3]; the others: min -1, max 2, mean 0.5``.
    """
    title = f"{name!r} ({spec_of(value) or 'nothing'})"
    if isinstance(value, np.ndarray) and is_bfloat16(value.dtype):
        value = value.astype(np.float32)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return title
    if value.size == 0:
        return f"{title} is empty"
    finite = np.isfinite(value)
    good = value[finite]
    numbers = (
        f"min {good.min():.6g}, max {good.max():.6g}, mean {good.mean(dtype=np.float64):.6g}"
        if good.size
        else "none"
    )
    bad = value.size - good.size
    if bad == 0:
        return f"{title} is finite: {numbers}"
    nans = int(np.isnan(value).sum())
    first = [int(i) for i in np.argwhere(~finite)[0]]
    return (
        f"{title} has {bad} of {value.size} elements that are not finite ({nans} NaN, {bad - nans} "
        f"infinite), the first at {first}; the others: {numbers}"
    )

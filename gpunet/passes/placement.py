"""Placement: a device and a kernel for every node, and copies where a value lies elsewhere than its reader.

An operator runs on the device that its definition asks for, else on the workspace's; where no kernel exists
there, on the CPU, which is reported once for each type with the reason and the bytes that cross (``strict``
makes it an error), unless it has no inputs.
"""

from __future__ import annotations

import logging

from gpunet.devices import CPU, Device, requested_device
from gpunet.errors import DeviceError
from gpunet.graph import Graph, Node, Value
from gpunet.kernels import Kernel, find, find_spread, reason_against
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

log = logging.getLogger("gpunet")
_reported: set[tuple[str, ...]] = set()


def place(graph: Graph, home: Device, *, strict: bool = False) -> Graph:
    """Chooses device and kernel of each node. ``home`` is the workspace's device.

    Raises :class:`DeviceError` where no kernel exists at all, or (``strict``) none on the device that was
    wanted.
    """
    for node in graph.nodes:
        op = node.op
        if op is None:
            continue
        if home.kind == "cuda" and _spread(node, op):
            continue
        wanted = wanted_device(op, home)
        node.device, node.kernel = _choose(node, op, wanted, strict)
        for value in node.outputs:
            value.device = node.device
    return graph


def _spread(node: Node, op: Operator) -> bool:
    """Leaves tensors of several GPUs where they are, if a kernel takes them so; whether it does.

    Each output lies with the input of its number.
    """
    devices = [value.device for value in node.inputs]
    if len(set(devices)) < max(2, len(devices)) or any(
        v.entry or v.device.kind != "cuda" for v in node.inputs
    ):
        return False
    found = find_spread(op, [v.spec for v in node.inputs], [v.spec for v in node.outputs])
    if found is None:
        return False
    node.device, node.kernel, node.spread = CPU, found, True
    for value, device in zip(node.outputs, devices, strict=False):
        value.device = device
    return True


def wanted_device(op: Operator, home: Device) -> Device:
    """Where the definition (its device option), else the workspace, wants the operator to run."""
    asked = requested_device(op.definition)
    if asked is None:
        return home
    if asked == CPU or home.kind != "cpu":
        return CPU if asked == CPU else Device(home.kind, asked.index)
    _report_once(
        ("missing", str(asked)),
        f"{op.where} asks for device {asked}, which this workspace does not have: running on {home}",
    )
    return home


def _choose(node: Node, op: Operator, wanted: Device, strict: bool) -> tuple[Device, Kernel]:
    inputs, outputs = [v.spec for v in node.inputs], [v.spec for v in node.outputs]
    try:
        if wanted == CPU or op.schema.host:
            return CPU, find(op, CPU.kind, inputs, outputs)
        reason = reason_against(op, wanted.kind, inputs, outputs)
        if reason is None:
            return wanted, find(op, wanted.kind, inputs, outputs)
        kernel = find(op, CPU.kind, inputs, outputs)
        if not inputs:
            # Its values come from the definition, as those of saved parameters do: as good as fed.
            return CPU, kernel
    except DeviceError as error:
        raise error.locate(op.where) from None
    if strict:
        raise DeviceError(f"cannot run on {wanted}: {reason} (strict placement)").locate(op.where)
    moved = sum(s.nbytes for s in [*inputs, *outputs] if isinstance(s, TensorSpec))
    _report_once(
        ("fallback", op.type, wanted.kind),
        f"{op.where} runs on the CPU, not on {wanted}: {reason}; up to {moved:,} bytes are copied each run",
    )
    return CPU, kernel


def _report_once(key: tuple[str, ...], message: str) -> None:
    if key not in _reported:
        _reported.add(key)
        log.warning(message)


def insert_copies(graph: Graph) -> Graph:
    """Adds a copy node in front of each node that reads a value which lies on another device.

    Entries need none: a blob is brought to where it is read before a run starts, so they only get one value
    for each device.
    """
    nodes: list[Node] = []
    entries: list[Value] = []
    there: dict[tuple[Value, Device], Value] = {}
    constants: set[Value] = set()
    for node in graph.nodes:
        inputs = []
        for value in node.inputs:
            if node.spread:
                inputs.append(value)
                continue
            key = (value, node.device)
            if value.entry and key not in there:
                there[key] = Value(value.name, value.spec, node.device, entry=True)
                entries.append(there[key])
            elif value.device != node.device and key not in there:
                there[key] = Value(value.name, value.spec, node.device)
                nodes.extend(_copies(value, there[key], node.index, constant=value in constants))
                if value in constants:
                    constants.add(there[key])
                if graph.finals.get(value.name) and graph.finals[value.name][0] is value:
                    graph.finals[value.name].append(there[key])
            inputs.append(there.get(key, value))
        node.inputs = tuple(inputs)
        nodes.append(node)
        if node.constant:
            constants.update(node.outputs)
    return Graph(nodes, entries, graph.finals)


def _copies(source: Value, target: Value, index: int, *, constant: bool) -> list[Node]:
    if CPU in (source.device, target.device):
        return [Node(None, (source,), (target,), index, target.device, constant=constant)]
    # Between two devices by way of the host.
    middle = Value(source.name, source.spec, CPU)
    return [
        Node(None, (source,), (middle,), index, CPU, constant=constant),
        Node(None, (middle,), (target,), index, target.device, constant=constant),
    ]

"""Nets: a list of operator definitions under a name, and what makes such a list well formed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from gpunet.definitions import make_operator
from gpunet.errors import NetError, SchemaError
from gpunet.proto import NetDef, OperatorDef
from gpunet.schema import is_registered
from gpunet.scope import current_device


class Net:
    """A net under construction; ``proto`` is its ``NetDef``, always up to date.

    Blobs are named by plain strings. A blob that is read before any operator of the net makes it becomes an
    external input.
    """

    def __init__(self, name: str, proto: NetDef | None = None) -> None:
        if not isinstance(name, str):
            raise NetError(f"a net is to be named {name!r}, wanted a text")
        self.proto = NetDef() if proto is None else proto
        self.proto.name = name
        self._made = {output for op in self.proto.op for output in op.output}
        self._external = set(self.proto.external_input)

    @property
    def name(self) -> str:
        """The net's name."""
        return self.proto.name

    def add(
        self,
        type: str,
        inputs: str | Sequence[str] = (),
        outputs: str | Sequence[str] | int | None = None,
        **args: Any,
    ) -> Any:
        """Appends an operator and returns the name of its output, or a tuple of names where there are
        several.

        Args:
            type: the operator's type.
            inputs: names of its inputs.
            outputs: names of its outputs, or their number (names are made then); one by default.
            args: its arguments; also ``name``, ``engine`` and ``device_option``.
        """
        if outputs is None or isinstance(outputs, int):
            outputs = self._fresh_names(type, 1 if outputs is None else outputs)
        device = current_device()
        if device is not None:
            args.setdefault("device_option", device.option())
        definition = make_operator(type, inputs, outputs, **args)
        self.append(definition)
        names = tuple(definition.output)
        return names[0] if len(names) == 1 else names

    def append(self, definition: OperatorDef) -> None:
        """Appends an operator definition (a copy)."""
        for name in definition.input:
            if name not in self._made and name not in self._external:
                self.add_external_input(name)
        self._made.update(definition.output)
        self.proto.op.append(definition)

    def extend(self, definitions: Iterable[OperatorDef]) -> None:
        """Appends several operator definitions."""
        for definition in definitions:
            self.append(definition)

    def add_external_input(self, *names: str) -> None:
        """Declares blobs that the net reads and does not make."""
        for name in names:
            if name not in self._external:
                self._external.add(name)
                self.proto.external_input.append(name)

    def add_external_output(self, *names: str) -> None:
        """Declares blobs that whoever runs the net will look at."""
        self.proto.external_output.extend(name for name in names if name not in self.proto.external_output)

    def makes(self, blob: str) -> bool:
        """Whether an operator of the net writes the blob."""
        return blob in self._made

    def _fresh_names(self, type: str, count: int) -> list[str]:
        taken = self._made | self._external
        names: list[str] = []
        number = 0
        while len(names) < count:
            candidate = f"{self.name}/{type}" + (f"_{number}" if number else "")
            number += 1
            if candidate not in taken:
                names.append(candidate)
        return names

    def __repr__(self) -> str:
        return f"Net({self.name!r}, {len(self.proto.op)} operators)"


NetLike: TypeAlias = Net | NetDef | bytes


def as_net_def(net: NetLike) -> NetDef:
    """The ``NetDef`` of a net in any of its forms; malformed bytes raise
    :class:`gpunet.errors.FormatError`.
    """
    if isinstance(net, Net):
        return net.proto
    if isinstance(net, bytes):
        from gpunet.serialization import parse

        return parse(NetDef, net, what="net")
    if not isinstance(net, NetDef):
        raise NetError(
            f"found {class_of(net)} as a net, wanted a gpunet.Net, a NetDef of gpunet or its bytes"
        )
    return net


def class_of(value: object) -> str:
    """The whole name of a value's class: messages of Caffe2 have the names of those of gpunet."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def check_order(net: NetDef, exists: Callable[[str], bool] = lambda name: False) -> None:
    """Raises :class:`NetError` where an operator reads a blob before it is made, or a declared output is
    never made.

    A net that declares external inputs may read nothing else from outside. One that declares none may, as in
    Caffe2, read any blob of the workspace: ``exists`` tells which those are.
    """
    makers: dict[str, int] = {}
    for index, op in enumerate(net.op):
        for name in op.output:
            makers.setdefault(name, index)
    external = set(net.external_input)
    made: set[str] = set()
    for index, op in enumerate(net.op):
        for name in [*op.input, *op.control_input]:
            if name in made or name in external or (not external and exists(name)):
                continue
            maker = makers.get(name, -1)
            if maker > index:
                raise NetError(_disorder(net, index, name, maker))
            if external and name in op.input:
                raise NetError(
                    f"[{op.type}] op {index} {_label(op)!r} in net {net.name!r}: the source of input "
                    f"{name!r} is unknown, wanted an external "
                    f"input of the net or an output of an earlier operator"
                )
        made.update(op.output)
    lost = [name for name in net.external_output if name not in made and name not in external]
    if lost:
        raise NetError(f"net {net.name!r} declares output {lost[0]!r}, but no operator makes it")


def check_types(net: NetDef) -> None:
    """Raises :class:`SchemaError` that names all types of the net's operators that do not exist, if there are
    several: who brings a net of another program wants to know them at once. A single one is left to
    :func:`gpunet.schema.lookup`, which knows similar names.
    """
    unknown = [op.type for op in net.op if not is_registered(op.type)]
    types = sorted(set(unknown))
    if len(types) > 1:
        raise SchemaError(
            f"net {net.name!r}: {len(unknown)} of its {len(net.op)} operators are of types that gpunet does "
            f"not have: {', '.join(types)}; gpunet.custom.operator adds types"
        )


def check_kept(net: NetDef, keep: Iterable[str], exists: Callable[[str], bool] = lambda name: False) -> None:
    """Raises :class:`NetError` where a blob to be kept is none of the net, and none that ``exists``."""
    known = {name for op in net.op for name in (*op.input, *op.output)}.union(net.external_input)
    unknown = next((name for name in keep if name not in known and not exists(name)), None)
    if unknown is None:
        return
    near = difflib.get_close_matches(unknown, sorted(known), n=3) or sorted(known)[:3]
    raise NetError(
        f"net {net.name!r} cannot keep {unknown!r}: none of its operators reads or writes such a blob, "
        f"wanted one of its {len(known)} blobs{', as ' * bool(near)}{', '.join(map(repr, near))}"
    )


def check_source(net: NetDef, index: int, name: str) -> None:
    """Raises :class:`NetError` if a blob that operator ``index`` reads is made by a later one, and by none
    before.
    """
    makers = [position for position, op in enumerate(net.op) if name in op.output]
    if makers and makers[0] >= index and name not in net.external_input:
        raise NetError(_disorder(net, index, name, makers[0]))


def _label(op: OperatorDef) -> str:
    return op.name or (op.output[0] if op.output else "")


def _disorder(net: NetDef, index: int, name: str, maker: int) -> str:
    reader = net.op[index]
    where = f"[{reader.type}] op {index} {_label(reader)!r} in net {net.name!r}"
    path = _path(net, index, maker)
    if path:
        chain = " -> ".join(f"{net.op[i].type} {_label(net.op[i])!r}" for i in path)
        cycle = f"{chain} -> {reader.type} {_label(reader)!r}"
        return f"{where}: the operators form a cycle: {cycle}, wanted an order without one"
    made = f"made by op {maker} ({net.op[maker].type})"
    return f"{where}: input {name!r} is used before it is {made}, wanted the operators in order of use"


def _path(net: NetDef, start: int, goal: int) -> list[int]:
    """Operators from ``start`` to ``goal`` along blobs that one writes and the next reads; empty if there are
    none.
    """
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(net.op):
        for name in [*op.input, *op.control_input]:
            readers.setdefault(name, []).append(index)
    parent = {start: -1}
    queue = [start]
    for index in queue:
        if index == goal:
            path = [index]
            while parent[path[-1]] != -1:
                path.append(parent[path[-1]])
            return path[::-1]
        for name in net.op[index].output:
            for reader in readers.get(name, ()):
                if reader not in parent:
                    parent[reader] = index
                    queue.append(reader)
    return []

"""Typed operator arguments: how a schema declares them and how a definition's ``arg`` list is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpunet.errors import ArgumentError, DataTypeError

if TYPE_CHECKING:
    from gpunet.proto import Argument, OperatorDef

REQUIRED: Final = object()


@dataclass(frozen=True)
class Arg:
    """One argument of an operator: a name, a kind, a default.

    Make them with :func:`Int`, :func:`Float` and so on.
    """

    name: str
    kind: str
    default: Any
    doc: str = ""
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()


def Int(name: str, default: Any = 0, doc: str = "", *, choices: tuple[int, ...] = ()) -> Arg:  # noqa: N802
    """A whole number, read from the field ``i``."""
    return Arg(name, "int", default, doc, choices)


def Bool(name: str, default: Any = False, doc: str = "") -> Arg:  # noqa: N802
    """A truth value, read from the field ``i``."""
    return Arg(name, "bool", default, doc)


def Float(name: str, default: Any = 0.0, doc: str = "") -> Arg:  # noqa: N802
    """A number, read from the field ``f`` (a float32) or ``i``."""
    return Arg(name, "float", default, doc)


def Str(name: str, default: Any = "", doc: str = "", *, choices: tuple[str, ...] = ()) -> Arg:  # noqa: N802
    """A text, read from the field ``s`` as UTF-8."""
    return Arg(name, "str", default, doc, choices)


def Ints(name: str, default: Any = (), doc: str = "") -> Arg:  # noqa: N802
    """A tuple of whole numbers, read from ``ints``."""
    return Arg(name, "ints", default, doc)


def Floats(name: str, default: Any = (), doc: str = "") -> Arg:  # noqa: N802
    """A tuple of numbers, read from ``floats`` or ``ints``."""
    return Arg(name, "floats", default, doc)


def Strings(name: str, default: Any = (), doc: str = "") -> Arg:  # noqa: N802
    """A tuple of byte strings, read from ``strings``."""
    return Arg(name, "strings", default, doc)


def Scalar(name: str, default: Any = 0, doc: str = "") -> Arg:  # noqa: N802
    """A number or byte string whose field gives its type: ``f`` a float, ``i`` an int, ``s`` bytes."""
    return Arg(name, "scalar", default, doc)


def Values(name: str, default: Any = (), doc: str = "") -> Arg:  # noqa: N802
    """A tuple of floats, ints or byte strings, read from whichever of ``floats``, ``ints`` and ``strings`` is
    filled.
    """
    return Arg(name, "values", default, doc)


def DataType(name: str, default: Any, doc: str = "") -> Arg:  # noqa: N802
    """An element type, given as a ``TensorProto.DataType`` number (field ``i``) or its name (field ``s``);
    read as a NumPy type.
    """
    return Arg(name, "dtype", default if default is REQUIRED or default is None else np.dtype(default), doc)


def Message(name: str, field: str, default: Any = None, doc: str = "") -> Arg:  # noqa: N802
    """A message, read from the field ``n`` (a net) or ``t`` (a tensor)."""
    return Arg(name, field, default, doc)


class Arguments:
    """The arguments of one operator definition: declared ones as attributes, with defaults filled in.

    ``given`` holds the names that the definition has, declared or not.
    """

    given: frozenset[str]

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]) -> None:
        self.__dict__.update(values)
        self.given = given

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no argument {name!r} is declared in this operator's schema")

    def has(self, name: str) -> bool:
        """Whether the definition gives the argument."""
        return name in self.given

    def __repr__(self) -> str:
        return f"Arguments({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items() if k != 'given')})"


def parse_arguments(definition: OperatorDef, table: Mapping[str, Arg]) -> Arguments:
    """Reads the arguments that ``table`` declares; raises :class:`ArgumentError` on a wrong type, value or a
    missing one.

    Where a definition gives an argument twice, equal values are accepted and unequal ones refused, as Caffe2
    does.
    """
    values = {arg.name: arg.default for arg in table.values()}
    seen: dict[str, Argument] = {}
    for message in definition.arg:
        name = message.name
        if name in seen and seen[name] != message:
            raise ArgumentError(f"argument {name!r} is given twice with different values")
        seen[name] = message
        arg = table.get(name)
        if arg is not None:
            values[arg.name] = _read(arg, message)
    for name, value in values.items():
        if value is REQUIRED:
            raise ArgumentError(f"argument {name!r} is missing, wanted {_KINDS[table[name].kind]}")
    return Arguments(values, frozenset(seen))


_KINDS: Final = {
    "int": "a whole number (field i)",
    "bool": "0 or 1 (field i)",
    "float": "a number (field f)",
    "str": "a text (field s)",
    "ints": "a list of whole numbers (field ints)",
    "floats": "a list of numbers (field floats)",
    "strings": "a list of strings (field strings)",
    "scalar": "a number or string (field f, i or s)",
    "values": "a list of numbers or strings (field floats, ints or strings)",
    "dtype": "an element type (field i or s)",
    "n": "a net (field n)",
    "t": "a tensor (field t)",
}


def _scalar_int(message: Argument) -> int:
    if message.HasField("i"):
        return message.i
    if message.HasField("f") and message.f == int(message.f):
        return int(message.f)
    raise ValueError


def _scalar_float(message: Argument) -> float:
    if message.HasField("f"):
        return message.f
    if message.HasField("i"):
        return float(message.i)
    raise ValueError


def _list(message: Argument, *fields: str) -> tuple[Any, ...]:
    for name in fields:
        if getattr(message, name):
            return tuple(getattr(message, name))
    if (
        any(message.HasField(f) for f in ("f", "i", "s", "n", "t"))
        or message.floats
        or message.ints
        or message.strings
    ):
        raise ValueError
    return ()


def _floats(message: Argument) -> tuple[float, ...]:
    return tuple(float(x) for x in _list(message, "floats", "ints"))


def _message(field: str) -> Callable[[Argument], Any]:
    def read(message: Argument) -> Any:
        if not message.HasField(field):
            raise ValueError
        return getattr(message, field)

    return read


def _scalar(message: Argument) -> float | int | bytes:
    for name in ("f", "i", "s"):
        if message.HasField(name):
            value: float | int | bytes = getattr(message, name)
            return value
    raise ValueError


def _text(message: Argument) -> str:
    if not message.HasField("s"):
        raise ValueError
    return message.s.decode("utf-8")


def _dtype(message: Argument) -> np.dtype:
    from gpunet.dtypes import as_dtype

    if message.HasField("s"):
        return as_dtype(message.s.decode("utf-8"))
    if message.HasField("i"):
        return as_dtype(message.i)
    raise ValueError


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": _scalar_int,
    "bool": lambda message: bool(_scalar_int(message)),
    "float": _scalar_float,
    "str": _text,
    "ints": lambda message: _list(message, "ints"),
    "floats": _floats,
    "strings": lambda message: _list(message, "strings"),
    "scalar": _scalar,
    "values": lambda message: _list(message, "floats", "ints", "strings"),
    "dtype": _dtype,
    "n": _message("n"),
    "t": _message("t"),
}


def _read(arg: Arg, message: Argument) -> Any:
    try:
        value = _READERS[arg.kind](message)
    except (ValueError, OverflowError, DataTypeError) as error:
        fields = ", ".join(f"{f.name}: {str(v)[:60]!r}" for f, v in message.ListFields() if f.name != "name")
        detail = f" ({error})" if str(error) else ""
        raise ArgumentError(
            f"argument {arg.name!r} holds {fields or 'nothing'}, wanted {_KINDS[arg.kind]}{detail}"
        ) from None
    if arg.choices and value not in arg.choices:
        raise ArgumentError(
            f"argument {arg.name!r} is {value!r}, wanted one of {', '.join(map(repr, arg.choices))}"
        )
    if arg.name == "epsilon" and value != value:
        # No comparison with it holds, so each device would guard or check in its own way.
        raise ArgumentError(f"argument {arg.name!r} is nan, wanted a number")
    return value

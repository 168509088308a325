"""Making operator definitions and their arguments from Python values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from gpunet.errors import ArgumentError
from gpunet.proto import Argument, DeviceOption, NetDef, OperatorDef, TensorProto


def make_argument(name: str, value: Any) -> Argument:
    """An argument from a Python value, after Caffe2's rule.

    Booleans and whole numbers go to ``i``, other numbers to ``f``, texts and bytes to ``s``; lists by the
    type of their elements (an empty list becomes an empty argument); nets to ``n``, tensors to ``t``; NumPy
    types to ``i`` as a data type number. Raises :class:`ArgumentError` for a mixed list and anything else.
    """
    argument = Argument(name=name)
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int)):
        argument.i = int(value)
    elif isinstance(value, float):
        argument.f = value
    elif isinstance(value, (str, bytes)):
        argument.s = value.encode() if isinstance(value, str) else value
    elif isinstance(value, (np.dtype, type)):
        from gpunet.dtypes import dtype_to_proto

        argument.i = dtype_to_proto(value)
    elif isinstance(value, NetDef):
        argument.n.CopyFrom(value)
    elif isinstance(value, TensorProto):
        argument.t.CopyFrom(value)
    elif isinstance(value, Message):
        argument.s = value.SerializeToString()
    elif isinstance(value, (list, tuple)):
        _fill_list(argument, [v.item() if isinstance(v, np.generic) else v for v in value])
    else:
        raise ArgumentError(
            f"argument {name!r} is {value!r} of type {type(value).__name__}, wanted a number, text, list or "
            "message"
        )
    return argument


def _fill_list(argument: Argument, values: list[Any]) -> None:
    if all(isinstance(v, (bool, int)) for v in values):
        argument.ints.extend(int(v) for v in values)
    elif all(isinstance(v, float) for v in values):
        argument.floats.extend(values)
    elif all(isinstance(v, (str, bytes)) for v in values):
        argument.strings.extend(v.encode() if isinstance(v, str) else v for v in values)
    elif all(isinstance(v, NetDef) for v in values):
        argument.nets.extend(values)
    elif all(isinstance(v, TensorProto) for v in values):
        argument.tensors.extend(values)
    else:
        kinds = sorted({type(v).__name__ for v in values})
        raise ArgumentError(
            f"argument {argument.name!r} is a list of {', '.join(kinds)}, wanted elements of one type"
        )


def make_operator(
    type: str,
    inputs: str | Sequence[str] = (),
    outputs: str | Sequence[str] = (),
    *,
    name: str = "",
    engine: str = "",
    device_option: DeviceOption | None = None,
    **args: Any,
) -> OperatorDef:
    """An operator definition; arguments that are ``None`` are left out.

    Raises :class:`ArgumentError` for inputs or outputs that are no names, and as :func:`make_argument` does.
    """
    if not isinstance(type, str):
        raise ArgumentError(f"the type of an operator is {type!r}, wanted a text")
    definition = OperatorDef(type=type, name=name)
    definition.input.extend(_names(type, "inputs", inputs))
    definition.output.extend(_names(type, "outputs", outputs))
    if engine:
        definition.engine = engine
    if device_option is not None:
        definition.device_option.CopyFrom(device_option)
    definition.arg.extend(make_argument(key, value) for key, value in args.items() if value is not None)
    return definition


def _names(type: str, what: str, given: Any) -> list[str]:
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"[{type}] {what} are {given!r}, wanted names of blobs: a text or a list of them")
    return names

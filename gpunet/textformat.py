"""Protobuf's text format, with the one name that Caffe2 changed: ``cuda_gpu_id``, now ``device_id``."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from gpunet.errors import FormatError
from gpunet.proto import DeviceOption

M = TypeVar("M", bound=Message)

_OLD_NAME = "cuda_gpu_id"
# As long as the old name, so that errors after it keep their column.
_NEW_NAME = "device_id".ljust(len(_OLD_NAME))

_TOKEN = re.compile(
    r"""
      (?P<string> "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? )
    | (?P<comment> \#[^\n]* )
    | (?P<name> [A-Za-z_][A-Za-z0-9_]* )
    | (?P<open> [{<] )
    | (?P<close> [}>] )
    """,
    re.VERBOSE | re.DOTALL,
)


def parse_text(message_type: type[M], text: str, *, what: str = "") -> M:
    """Reads one message from its text form.

    Args:
        message_type: class of the message.
        text: the whole text. In a DeviceOption ``cuda_gpu_id`` is read as ``device_id``.
        what: what is being read, for errors (a path, say); the message's name when empty.

    Raises:
        FormatError: a name or value that the message does not have, with its line and column; a missing
            required field; nesting too deep for Python's stack.
    """
    what = what or f"{message_type.DESCRIPTOR.name} text"
    message = message_type()
    try:
        text_format.Parse(_with_new_names(text, message_type.DESCRIPTOR), message)
    except text_format.ParseError as error:
        reason = re.sub(r"^\d+:\d+ : ", "", str(error)).rstrip(".")
        line, column = error.GetLine(), error.GetColumn()
        place = f"line {line}, column {column}: " if line is not None and column is not None else ""
        raise FormatError(
            f"{what}: {place}{reason}, wanted a {message_type.DESCRIPTOR.name} as text"
        ) from None
    except RecursionError:
        raise FormatError(f"{what}: messages are nested too deeply") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(f"{what}: {error}") from None
    require_complete(message, what)
    return message


def format_text(message: Message) -> str:
    """The text form of a message, one field a line, which :func:`parse_text` reads back."""
    return text_format.MessageToString(message, as_utf8=True)


def require_complete(message: Message, what: str) -> None:
    """Raises FormatError when a required field of the message, at any depth, is not set."""
    if not message.IsInitialized():
        unset: Any = message  # The stubs of protobuf lack the next method.
        missing = ", ".join(unset.FindInitializationErrors())
        raise FormatError(f"{what}: {message.DESCRIPTOR.name} lacks required fields: {missing}")


def _with_new_names(text: str, root: Any) -> str:
    """Replaces the old name where a field of a DeviceOption is expected, and nowhere else."""
    if _OLD_NAME not in text:
        return text
    parts: list[str] = []
    copied = 0
    # The message of each open brace (None: unknown), and the name that was read last in it. A name stays
    # valid over a whole list of messages: `op: [{...}, {...}]`.
    stack: list[tuple[Any, str]] = [(root, "")]
    for token in _TOKEN.finditer(text):
        descriptor, name = stack[-1]
        kind, found = token.lastgroup, token.group()
        if kind == "name":
            stack[-1] = (descriptor, found)
            if found == _OLD_NAME and descriptor is DeviceOption.DESCRIPTOR:
                parts += (text[copied : token.start()], _NEW_NAME)
                copied = token.end()
        elif kind == "open":
            field = descriptor.fields_by_name.get(name) if descriptor is not None else None
            stack.append((field.message_type if field is not None else None, ""))
        elif kind == "close" and len(stack) > 1:
            stack.pop()
    parts.append(text[copied:])
    return "".join(parts)

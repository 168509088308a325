"""Name scopes and device scopes: prefixes of blob names, and where operators made inside are placed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gpunet.devices import Device, parse_device

SEPARATOR = "/"

_names: ContextVar[str] = ContextVar("gpunet_name_scope", default="")
_device: ContextVar[Device | None] = ContextVar("gpunet_device_scope", default=None)


@contextmanager
def name_scope(name: str) -> Iterator[str]:
    """Names made by a model's helpers inside begin with ``name/``; scopes nest. Yields the whole prefix."""
    prefix = _names.get() + name + SEPARATOR if name else _names.get()
    token = _names.set(prefix)
    try:
        yield prefix
    finally:
        _names.reset(token)


@contextmanager
def device_scope(device: str | Device) -> Iterator[Device]:
    """Operators added to nets inside carry this device; the innermost scope wins."""
    chosen = parse_device(device)
    token = _device.set(chosen)
    try:
        yield chosen
    finally:
        _device.reset(token)


def scoped(name: str) -> str:
    """``name`` with the present prefix."""
    return _names.get() + name


def current_device() -> Device | None:
    """The device of the innermost scope."""
    return _device.get()

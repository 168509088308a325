"""Pieces of bound kernels: callables without arguments, put together once when a program is bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gpunet.cpu_fallback.precision import Array
from gpunet.operator import Operator
from gpunet.specs import TensorSpec

Step: TypeAlias = Callable[[], Any]

Specs: TypeAlias = Sequence[TensorSpec]


def mask_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    """Scratch: a bool for each element of input 0."""
    return [inputs[0].with_dtype(np.bool_)]


def input_scratch(op: Operator, inputs: Specs, outputs: Specs) -> Specs:
    """Scratch: one tensor like input 0."""
    return [inputs[0]]


def constant(value: float, like: Array) -> Array:
    """A number of the type of ``like``, as an array of no dimensions: NumPy reads it faster than a scalar."""
    return np.array(value, like.dtype)


def wide_constant(value: float, like: Array) -> Array:
    """The same for arithmetic that runs in float32 where ``like`` is float16."""
    return np.array(value, np.float32 if like.dtype == np.float16 else like.dtype)


def in_turn(*steps: Step | None) -> Step:
    """One step that runs the given ones, leaving out those that are ``None``."""
    chosen = [step for step in steps if step is not None]
    if len(chosen) == 1:
        return chosen[0]
    if len(chosen) == 2:
        first, second = chosen

        def run_both() -> None:
            first()
            second()

        return run_both

    def run() -> None:
        for step in chosen:
            step()

    return run


def is_same(a: Array, b: Array) -> bool:
    """Whether two arrays are the same elements in memory."""
    if a.shape != b.shape or a.ctypes.data != b.ctypes.data:
        return False
    # A step along a dimension of one element is never taken.
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))


def copy_step(source: Array, target: Array) -> Step | None:
    """A step that copies between arrays of one shape and type; none where they are the same memory."""
    return None if is_same(source, target) else partial(np.copyto, target, source)


def keep_step(mask: Array, source: Array, target: Array) -> Step:
    """A step that writes ``source`` where ``mask`` holds and 0 elsewhere. It uses up the mask.

    It selects bit patterns (a number AND all ones or all zeros) instead of multiplying by 0 or 1, so that
    infinities and NaN that are masked out leave no trace. NumPy's ``where`` does the same, but branches at
    each element and takes many times as long on a random mask. ``target`` may be ``source``.
    """
    word = np.dtype(f"i{source.itemsize}")
    flags, bits, result = mask.view(np.int8), source.view(word), target.view(word)

    def run() -> None:
        np.negative(flags, flags)
        np.bitwise_and(bits, flags, result)

    return run

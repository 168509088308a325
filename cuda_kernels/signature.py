"""Declared signatures of CUDA kernels: what a launch passes is checked against them, and so are the sources.

A kernel is declared with the parameter list of its C++ function, with type parameters in place of element
types::

    RELU = Kernel("activation", "relu_fwd", "const T* x, T* y, int64 n", T=FLOATS)

stands for the functions ``relu_fwd_f32(const float* x, float* y, int64 n)`` and so on in ``activation.cu``.
Several type parameters give several suffixes, in the order in which they are declared:
``gather_fwd_f32_i64``.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.dtypes import BFLOAT16
from gpunet.errors import DataTypeError, SchemaError

#: Suffix and C++ name of each element type in kernel sources (include/gpunet.cuh defines the names).
SUFFIXES: Final[dict[np.dtype, tuple[str, str]]] = {
    np.dtype("float16"): ("f16", "float16"),
    np.dtype("float32"): ("f32", "float"),
    np.dtype("float64"): ("f64", "double"),
    np.dtype("int8"): ("i8", "int8"),
    np.dtype("uint8"): ("u8", "uint8"),
    np.dtype("int16"): ("i16", "int16"),
    np.dtype("uint16"): ("u16", "uint16"),
    np.dtype("int32"): ("i32", "int32"),
    np.dtype("int64"): ("i64", "int64"),
    np.dtype("bool"): ("b8", "bool"),
}
if BFLOAT16 is not None:
    SUFFIXES[BFLOAT16] = ("bf16", "bfloat16")

#: bfloat16 is among them where NumPy has the type (package ml_dtypes).
FLOATS: Final = ("float32", "float16", *(() if BFLOAT16 is None else ("bfloat16",)), "float64")
HALVES: Final = tuple(t for t in FLOATS if t.endswith("16"))
INDICES: Final = ("int32", "int64")
NUMBERS: Final = (*FLOATS, "int8", "uint8", "int16", "uint16", "int32", "int64")

#: For compilers: sources make their kernels for the types of ``FLOATS``.
DEFINES: Final = () if BFLOAT16 is None else ("-DGPUNET_BFLOAT16",)

_SCALARS: Final[dict[str, tuple[Any, np.dtype]]] = {
    "int32": (ctypes.c_int32, np.dtype("int32")),
    "uint32": (ctypes.c_uint32, np.dtype("uint32")),
    "int64": (ctypes.c_int64, np.dtype("int64")),
    "uint64": (ctypes.c_uint64, np.dtype("uint64")),
    "float": (ctypes.c_float, np.dtype("float32")),
    "double": (ctypes.c_double, np.dtype("float64")),
}
_ELEMENTS: Final[dict[str, np.dtype]] = {
    **{cpp: dtype for dtype, (_, cpp) in SUFFIXES.items()},
    "uint32": np.dtype("uint32"),
    "uint64": np.dtype("uint64"),
}
_PARAMETER = re.compile(r"^(const )?(\w+)(\*?) (\w+)$")


@dataclass(frozen=True)
class Parameter:
    """One parameter: a pointer to elements (read only if ``const``) or a scalar passed by value."""

    name: str
    type: str
    pointer: bool
    const: bool


#: All declared kernels by (module, name): what the tests compile, build and run.
declared: dict[tuple[str, str], Kernel] = {}


class Kernel:
    """A family of ``extern "C"`` functions that differ in element types.

    Args:
        module: name of the ``.cu`` file, without ending.
        name: name of the functions, without suffixes.
        parameters: the C++ parameter list.
        types: for each type parameter, the NumPy names of the element types that it is instantiated with.
    """

    def __init__(self, module: str, name: str, parameters: str, **types: Sequence[str]) -> None:
        self.module = module
        self.name = name
        self.types = {key: tuple(np.dtype(t) for t in value) for key, value in types.items()}
        self.parameters = [self._parse(text.strip()) for text in parameters.split(",")]
        if (module, name) in declared:
            raise SchemaError(f"kernel {name!r} of {module}.cu is declared twice")
        declared[module, name] = self

    def _parse(self, text: str) -> Parameter:
        match = _PARAMETER.match(text)
        if match is None:
            raise SchemaError(
                f"kernel {self.name!r}: cannot read parameter {text!r}, wanted '[const] type[*] name'"
            )
        const, type, star, name = match.groups()
        known = type in self.types or (type in _ELEMENTS if star else type in _SCALARS)
        if not known:
            raise SchemaError(f"kernel {self.name!r}: parameter {name!r} has unknown type {type!r}")
        return Parameter(name, type, bool(star), bool(const))

    def instances(self) -> Iterator[tuple[np.dtype, ...]]:
        """All combinations of element types that the source instantiates."""
        yield from itertools.product(*self.types.values())

    def function_name(self, *types: np.dtype) -> str:
        """Name of the function for these element types; raises :class:`DataTypeError` if it is not
        instantiated.
        """
        for key, found in zip(self.types, types, strict=True):
            if found not in self.types[key]:
                wanted = ", ".join(t.name for t in self.types[key])
                raise DataTypeError(
                    f"kernel {self.name!r} is not made for {key} = {found}, wanted one of {wanted}"
                )
        return "_".join([self.name, *(SUFFIXES[t][0] for t in types)])

    def element_type(self, parameter: Parameter, types: Sequence[np.dtype]) -> np.dtype:
        """Element type of a pointer, or type of a scalar, in one instance."""
        if parameter.type in self.types:
            return types[list(self.types).index(parameter.type)]
        return _ELEMENTS[parameter.type] if parameter.pointer else _SCALARS[parameter.type][1]

    def cpp_parameters(self, *types: np.dtype) -> str:
        """The C++ parameter types of one instance, as a list for a function pointer."""
        names = [
            SUFFIXES[types[list(self.types).index(p.type)]][1] if p.type in self.types else p.type
            for p in self.parameters
        ]
        return ", ".join(
            f"{'const ' if p.const else ''}{name}{'*' if p.pointer else ''}"
            for p, name in zip(self.parameters, names, strict=True)
        )


class Conversion(Kernel):
    """Kernels from one element type to another: of equal types there are none."""

    def instances(self) -> Iterator[tuple[np.dtype, ...]]:
        """All pairs of types that differ."""
        yield from (types for types in super().instances() if len(set(types)) == len(types))

    def function_name(self, *types: np.dtype) -> str:
        """Name of the function for these types; raises :class:`DataTypeError` for equal ones too."""
        if len(set(types)) < len(types):
            raise DataTypeError(
                f"kernel {self.name!r} is not made for {types[0].name} twice, wanted types that differ"
            )
        return super().function_name(*types)


def scalar(type: str, value: Any) -> Any:
    """A ctypes scalar of a C++ type."""
    return _SCALARS[type][0](value)

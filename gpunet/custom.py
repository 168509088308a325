"""Operators of your own: schema, NumPy kernel, CUDA source and gradient in one call.

::

    SOURCE = '''
    #include "vector.cuh"
    GPUNET_UNARY(swish, x / (1 + exp(-x)))
    '''
    custom.operator("Swish", numpy=lambda x: x / (1 + np.exp(-x)), cuda=SOURCE)

It registers what the built-in operators register by hand (:mod:`gpunet.schema`, :mod:`gpunet.kernels`,
:mod:`gpunet.cuda_kernels.signature`); an operator that needs more (scratch, several launches, optional or
variadic inputs on a device) is written that way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from gpunet import schema
from gpunet.arguments import Arg, Arguments
from gpunet.dtypes import as_dtype
from gpunet.errors import DataTypeError, GradientError, KernelError, SchemaError
from gpunet.gradient_maker import GradientBuilder
from gpunet.kernels import KernelContext, kernel
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.rules import want_same_type, want_shape
from gpunet.schema import GradientFunction, GradientRule, InferFunction, Input, OpSchema, Output

if TYPE_CHECKING:
    from gpunet.buffers import Buffer
    from gpunet.cuda_kernels.signature import Kernel

#: From (inputs, outputs, arguments) to what a launch needs; the former have ``shape``, ``size``, ``dtype``.
Buffers: TypeAlias = "Sequence[Buffer]"
ScalarsFunction: TypeAlias = Callable[[Buffers, Buffers, Arguments], Mapping[str, float]]
GridFunction: TypeAlias = Callable[[Buffers, Buffers, Arguments], tuple[int, int]]

FLOATS: Final = tuple(sorted(t.name for t in schema.FLOATS))
#: C++ type by which an argument of a kind is passed.
_SCALARS: Final = {"int": "int64", "bool": "int32", "float": "double"}
_TYPE: Final = re.compile(r"\b(\w+)\*")
#: The module of each source that was given, so that operators can share one.
_modules: dict[str | Path, str] = {}


def operator(
    type: str,
    *,
    numpy: Callable[..., Any],
    inputs: Sequence[str | Input] = ("X",),
    outputs: Sequence[str | Output] = ("Y",),
    args: Sequence[Arg] = (),
    infer: InferFunction | None = None,
    gradient: str | GradientFunction | GradientRule = schema.NOT_DIFFERENTIABLE,
    cuda: str | Path | None = None,
    function: str = "",
    parameters: str = "",
    types: Sequence[str] | Mapping[str, Sequence[str]] = FLOATS,
    scalars: ScalarsFunction | None = None,
    grid: GridFunction | None = None,
    inplace: Collection[tuple[int, int]] = (),
    elementwise: bool = False,
    doc: str = "",
) -> OpSchema:
    """Registers an operator for ``cpu`` and, with ``cuda``, for ``cuda:N`` and ``sim:N``; returns its schema.

    Args:
        type: its name in nets.
        numpy: called with the input arrays, and the arguments by name; returns the output, or a tuple of
            them. It must not change its inputs. NumPy's BLAS has one thread while a net runs.
        inputs: their names, or :class:`gpunet.schema.Input`. An input given by name takes the element types
            that its kernel parameter takes, or ``types``; where these are floats, all floats.
        outputs: their names, or :class:`gpunet.schema.Output`.
        args: typed arguments, made with :mod:`gpunet.arguments`.
        infer: (operator, specs of inputs) to specs of outputs; by default all inputs have the shape and the
            type of the first, and so have the outputs.
        gradient: the type of the gradient operator, whose inputs and outputs are found by their names: ``X``
            or ``Y`` is an input or output of this operator, ``dY`` the gradient of an output, ``dX`` that of
            an input. Or a function, as :func:`gpunet.schema.register` takes. By default asking for the
            gradient is an error.
        cuda: CUDA source, or the path of a ``.cu`` file, with ``extern "C"`` kernels; the headers of
            ``cuda_kernels/include`` can be included. Operators may share a source.
        function: name of the kernel, without suffixes of types; by default ``swish_gradient`` for
            ``SwishGradient``.
        parameters: the C++ parameter list, ``const T* x, T* y, int64 n``: pointers for the inputs and the
            outputs in order, and scalars. ``n`` is the number of elements of the first output, the name of
            an argument its value, any other name comes from ``scalars``. By default the pointers, ``n``, and
            all arguments.
        types: element types that the source instantiates for ``T``, or for each type parameter by name.
            Other floats run on the CPU.
        scalars: (inputs, outputs, arguments) to the values of other scalar parameters, by name.
        grid: (inputs, outputs, arguments) to (blocks, threads), 32 to 1024 threads; by default enough for a
            ``GPUNET_LOOP`` over ``n``.
        inplace: pairs (input, output) that may share one blob; both kernels must be right then.
        elementwise: the output is at each position a function of the inputs at that position: on the CPU it
            may be computed in blocks, with what comes before and behind it (:func:`gpunet.schema.register`).
        doc: one paragraph with the formula.

    Raises:
        SchemaError: the name is taken, or parameters, inputs and outputs do not fit together.
        OSError: ``cuda`` is the path of a file that is not there.
    """
    if type in schema.registered_types():
        raise SchemaError(f"operator {type!r} is already registered, wanted a name of its own")
    named = types if isinstance(types, Mapping) else {"T": types}
    parameter_types = {key: tuple(as_dtype(t).name for t in value) for key, value in named.items()}
    wanted: Sequence[frozenset[np.dtype]] = [frozenset(map(as_dtype, next(iter(parameter_types.values()))))]
    declared: Kernel | None = None
    if cuda is not None:
        text = parameters or _default_parameters(inputs, outputs, args)
        declared = _declare(type, cuda, function or _snake(type), text, parameter_types)
        _check_parameters(type, declared, inputs, outputs, args, scalars is not None)
        wanted = _element_types(declared)
    places = [
        x if isinstance(x, Input) else Input(x, types=_with_floats(wanted[min(i, len(wanted) - 1)]))
        for i, x in enumerate(inputs)
    ]
    made = schema.register(
        type,
        inputs=places,
        outputs=[y if isinstance(y, Output) else Output(y) for y in outputs],
        infer=infer or _like_first,
        args=args,
        inplace=inplace,
        elementwise=elementwise,
        gradient=_by_name(gradient) if isinstance(gradient, str) else gradient,
        doc=doc or (numpy.__doc__ or "").strip(),
    )
    kernel(type)(_numpy_kernel(numpy, args))
    if declared is not None:
        kernel(type, device="cuda", binds=True, against=_against(declared))(
            _launcher(declared, scalars, grid)
        )
    return made


def _with_floats(types: frozenset[np.dtype]) -> frozenset[np.dtype]:
    """All floats, where the kernel takes floats: the NumPy function takes them, and gradients are compared in
    float64.
    """
    return schema.FLOATS if types <= schema.FLOATS else types


def _snake(type: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type).lower()


def _name(place: str | Input | Output) -> str:
    return place if isinstance(place, str) else place.name


def _like_first(op: Operator, inputs: Sequence[Any]) -> list[Any]:
    for i in range(1, len(inputs)):
        want_shape(op, inputs, i, inputs[0].shape, "that of the first input")
    want_same_type(op, inputs)
    return [inputs[0]] * len(op.outputs)


# ---- gradient ----


def _by_name(type: str) -> GradientFunction:
    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        made, forward = schema.lookup(type), g.op.schema
        ins = {x.name: i for i, x in enumerate(forward.inputs)}
        outs = {y.name: o for o, y in enumerate(forward.outputs)}

        def source(name: str) -> str:
            if name in ins:
                return g.input(ins[name])
            if name in outs:
                return g.output(outs[name])
            if name[:1] == "d" and name[1:] in outs:
                return g.output_grad(outs[name[1:]])
            known = [*ins, *outs, *(f"d{name}" for name in outs)]
            raise GradientError(
                f"input {name!r} of {type!r} is unknown here, wanted one of {', '.join(known)}"
            )

        def target(name: str) -> str:
            if name[:1] == "d" and name[1:] in ins:
                return g.input_grad(ins[name[1:]])
            known = ", ".join(f"d{name}" for name in ins)
            raise GradientError(f"output {name!r} of {type!r} is unknown here, wanted one of {known}")

        return g.single(type, [source(x.name) for x in made.inputs], [target(y.name) for y in made.outputs])

    return gradient


# ---- CPU ----


def _numpy_kernel(numpy: Callable[..., Any], declared: Sequence[Arg]) -> Callable[..., None]:
    names = [arg.name for arg in declared]

    def compute(
        inputs: tuple[Any, ...], outputs: tuple[Any, ...], args: Arguments, ctx: KernelContext
    ) -> None:
        result = numpy(*inputs, **{name: getattr(args, name) for name in names})
        found = result if isinstance(result, tuple) else (result,)
        if len(found) < len(outputs):
            raise KernelError(f"the NumPy function returned {len(found)} arrays, wanted {len(outputs)}")
        for o, (target, value) in enumerate(zip(outputs, map(np.asarray, found), strict=False)):
            name = ctx.op.schema.output_at(o).name
            if value.shape != target.shape:
                raise KernelError(
                    f"the NumPy function returned {name} of shape {value.shape}, wanted {target.shape} as "
                    "inferred"
                )
            if not np.can_cast(value.dtype, target.dtype, "same_kind"):
                raise DataTypeError(
                    f"the NumPy function returned {name} as {value.dtype}, wanted {target.dtype} as inferred"
                )
            np.copyto(target, value, casting="same_kind")

    return compute


# ---- CUDA ----


def _default_parameters(
    inputs: Sequence[str | Input], outputs: Sequence[str | Output], args: Sequence[Arg]
) -> str:
    parts = [f"const T* {_name(x)}" for x in inputs] + [f"T* {_name(y)}" for y in outputs] + ["int64 n"]
    return ", ".join([*parts, *(f"{_SCALARS[arg.kind]} {arg.name}" for arg in args if arg.kind in _SCALARS)])


def _declare(
    type: str, cuda: str | Path, function: str, text: str, types: Mapping[str, tuple[str, ...]]
) -> Kernel:
    from gpunet.cuda_kernels import signature
    from gpunet.cuda_kernels.sources import register_source

    source: str | Path = cuda
    if isinstance(cuda, Path) or ("\n" not in cuda and cuda.endswith(".cu")):
        source = Path(cuda).resolve(strict=True)
    default = source.stem if isinstance(source, Path) else f"custom_{_snake(type)}"
    module = _modules.get(source, default)
    used = set(_TYPE.findall(text))
    made = signature.Kernel(module, function, text, **{k: v for k, v in types.items() if k in used})
    try:
        register_source(module, source)
    except SchemaError:
        del signature.declared[module, function]
        raise
    _modules[source] = module
    return made


def _check_parameters(
    type: str,
    declared: Kernel,
    inputs: Sequence[str | Input],
    outputs: Sequence[str | Output],
    args: Sequence[Arg],
    others: bool,
) -> None:
    """Raises :class:`SchemaError`, and takes the declaration back, where parameters and operator differ."""
    from gpunet.cuda_kernels import signature

    pointers = [p for p in declared.parameters if p.pointer]
    known = {"n", *(arg.name for arg in args if arg.kind in _SCALARS)}
    unknown = [p.name for p in declared.parameters if not p.pointer and p.name not in known]
    open_ended = [
        _name(x) for x in (*inputs, *outputs) if not isinstance(x, str) and (x.optional or x.variadic)
    ]
    problem = ""
    if open_ended:
        problem = f"{open_ended[0]!r} is optional or variadic, which only a launcher of your own can take"
    elif len(pointers) != len(inputs) + len(outputs):
        problem = (
            f"{len(pointers)} pointers are declared, wanted {len(inputs)} for the inputs and {len(outputs)} "
            "for the outputs"
        )
    elif unknown and not others:
        problem = f"scalar {unknown[0]!r} is unknown, wanted {', '.join(sorted(known))}, or scalars=..."
    else:
        writeable = next((p.name for p in pointers[: len(inputs)] if not p.const), None)
        constant = next((p.name for p in pointers[len(inputs) :] if p.const), None)
        if writeable is not None:
            problem = f"{writeable!r} is an input, wanted a const pointer"
        elif constant is not None:
            problem = f"{constant!r} is an output, wanted a pointer that is not const"
    if problem:
        del signature.declared[declared.module, declared.name]
        raise SchemaError(f"operator {type!r}, kernel {declared.name!r}: {problem}")


def _element_types(declared: Kernel) -> list[frozenset[np.dtype]]:
    """The element types that each pointer can have."""
    from gpunet.cuda_kernels.signature import SUFFIXES

    plain = {cpp: frozenset([dtype]) for dtype, (_, cpp) in SUFFIXES.items()}
    return [
        frozenset(declared.types[p.type]) if p.type in declared.types else plain.get(p.type, frozenset())
        for p in declared.parameters
        if p.pointer
    ]


def _against(declared: Kernel) -> Callable[[Operator, Sequence[Any], Sequence[Any]], str | None]:
    pointers = [p.type for p in declared.parameters if p.pointer]
    firsts = {key: pointers.index(key) for key in declared.types}

    def against(op: Operator, inputs: Sequence[Any], outputs: Sequence[Any]) -> str | None:
        """Which element type there is no kernel for."""
        for key, at in firsts.items():
            found = (*inputs, *outputs)[at].dtype
            if found not in declared.types[key]:
                names = ", ".join(t.name for t in declared.types[key])
                return f"kernel {declared.name!r} is made for {key} of {names}, found {found.name}"
        return None

    return against


def _launcher(
    declared: Kernel, scalars: ScalarsFunction | None, grid: GridFunction | None
) -> Callable[..., Callable[[], None]]:
    from gpunet.cuda_kernels import launch
    from gpunet.cuda_kernels.pieces import nothing

    pointers = [p.type for p in declared.parameters if p.pointer]
    firsts = [pointers.index(key) for key in declared.types]

    def bind(
        inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...], args: Arguments, ctx: KernelContext
    ) -> Callable[[], None]:
        n = outputs[0].size
        if n == 0 and grid is None:
            return nothing
        given = {} if scalars is None else scalars(inputs, outputs, args)
        buffers = iter((*inputs, *outputs))

        def scalar(name: str) -> float:
            if name in given:
                return given[name]
            if name == "n":
                return n
            if name in ctx.op.schema.arg_table:
                value: float = getattr(args, name)
                return value
            raise KernelError(
                f"kernel {declared.name!r}: scalars=... gave no {name!r}, found {', '.join(given) or 'none'}"
            )

        values = tuple(next(buffers) if p.pointer else scalar(p.name) for p in declared.parameters)
        types = tuple((*inputs, *outputs)[i].dtype for i in firsts)
        chosen = launch.elementwise(n) if grid is None else grid(inputs, outputs, args)
        return launch.prepare(ctx, declared, types, values, chosen)

    return bind

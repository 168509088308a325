"""The one helper that checks an operator: a case is a row of a table, `check_*` are rules for every row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gpunet
from gpunet import gradient_check, kernels, schema
from gpunet.definitions import make_operator
from gpunet.dtypes import is_bfloat16, is_float
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from gpunet.specs import OpaqueSpec, TensorSpec


@dataclasses.dataclass
class OpCase:
    """One row: an operator, its inputs, and what is expected of it.

    Attributes:
        type: operator type.
        inputs: arrays, or any object for opaque inputs.
        args: arguments of the definition.
        outputs: number of outputs.
        reference: called with the inputs (floats as float64), gives the expected output or a tuple of them,
            `None` for those not compared.
        check: in place of a reference for random operators: called with (outputs, inputs), asserts by itself.
        gradient: indices of inputs whose gradient is compared with central differences in float64; by default
            all float inputs that have one. `()` switches it off.
        grad_outputs: outputs that the loss depends on; by default the first, or all of a variadic list.
        empty: whether the row also runs with dimension 0 of input 0 (and of inputs of the same shape) set to
            0; or the indices of those to empty; `False` where an empty input makes no sense, with a comment.
        inplace: whether all in-place pairs of the schema are tried too.
        raises: error class and a part of its message; then nothing else is checked.
    """

    type: str
    inputs: Sequence[Any]
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    outputs: int = 1
    reference: Callable[..., Any] | None = None
    check: Callable[[list[Any], list[Any]], None] | None = None
    gradient: tuple[int, ...] | None = None
    grad_outputs: tuple[int, ...] | None = None
    empty: bool | tuple[int, ...] = True
    inplace: bool = True
    engine: str = ""
    id: str = ""
    rtol: float = 1e-5
    atol: float = 1e-6
    raises: tuple[type[Exception], str] | None = None

    def name(self) -> str:
        shapes = "_".join("x".join(map(str, np.shape(x))) or "0d" for x in self.inputs[:3])
        args = "_".join(f"{k}{v}".replace(" ", "") for k, v in self.args.items())
        return "-".join(filter(None, [self.type, self.id or f"{shapes}-{args}"[:60]]))

    def in_type(self, dtype: np.dtype) -> list[OpCase]:
        """The row in another type in place of float32: all inputs, and where the others are vectors the data
        alone. An operator need not take the types together.
        """
        floats = [i for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray) and x.dtype == np.float32]
        # Probabilities that are rounded do not sum to 1.
        if not floats or "label_prob" in self.args:
            return []
        name = f"{self.id or self.name().removeprefix(f'{self.type}-')}-{dtype}"
        data, *others = (self.inputs[i] for i in floats)
        mixed = others and data.ndim > 1 and all(x.ndim == 1 for x in others)
        found = []
        for chosen in (floats, floats[:1]) if mixed else (floats,):
            with np.errstate(over="ignore"):
                inputs = [x.astype(dtype) if i in chosen else x for i, x in enumerate(self.inputs)]
            id = name if chosen == floats else f"{name}-data"
            found.append(dataclasses.replace(self, inputs=inputs, id=id))
        return found

    def definition(self, inplace: dict[int, int] | None = None) -> OperatorDef:
        """The definition, with output `o` named as input `i` for each `inplace` item (o, i)."""
        declared = schema.lookup(self.type)
        inputs = [f"in{i}" for i in range(len(self.inputs))]
        pairs = {o: i for i, o in declared.enforce_inplace} | (inplace or {})
        outputs = [
            inputs[pairs[o]] if pairs.get(o, len(inputs)) < len(inputs) else f"out{o}"
            for o in range(self.outputs)
        ]
        return make_operator(self.type, inputs, outputs, engine=self.engine, **self.args)


POISON = {"f": np.nan, "V": np.nan, "i": 0x5A, "u": 0x5A, "b": True}


def poisoned(spec: TensorSpec) -> np.ndarray:
    return np.full(
        spec.shape, b"poison" if spec.dtype == object else POISON[spec.dtype.kind], dtype=spec.dtype
    )


def execute(definition: OperatorDef, inputs: Sequence[Any]) -> list[Any]:
    """Runs the kernel on these very arrays with poisoned outputs and scratch; inference must be right."""
    op = Operator(definition)
    specs = [
        TensorSpec(x.shape, x.dtype) if isinstance(x, np.ndarray) else OpaqueSpec(type(x).__name__)
        for x in inputs
    ]
    inferred = op.infer(specs)
    found = kernels.find(op, "cpu", specs, inferred)
    aliased = {o: op.inputs.index(name) for o, name in enumerate(op.outputs) if name in op.inputs}
    outputs: Any = ()
    scratch: tuple[Any, ...] = ()
    if not op.dynamic:
        outputs = tuple(
            inputs[aliased[o]].reshape(s.shape) if o in aliased else poisoned(s)
            for o, s in enumerate(inferred)
        )
        if found.scratch is not None:
            scratch = tuple(poisoned(s) for s in found.scratch(op, specs, inferred))
    context = kernels.KernelContext(op, seed=1701, operator_id=7, scratch=scratch)
    with np.errstate(all="ignore"):
        result = found.function(tuple(inputs), outputs, op.args, context)
        if found.binds:
            result = result()
    if op.dynamic:
        outputs = result
    for name, want, got in zip(op.outputs, inferred, outputs, strict=True):
        if isinstance(want, TensorSpec):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), (
                f"{name} is {got.dtype} {got.shape}, inferred {want}"
            )
    return list(outputs)


def copies(inputs: Sequence[Any]) -> list[Any]:
    return [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]


def assert_same(got: Any, want: Any, rtol: float, atol: float, what: str) -> None:
    if isinstance(got, np.ndarray) and is_float(got.dtype):
        if got.dtype == np.float16:
            rtol, atol = max(rtol, 2e-3), max(atol, 2e-3)
        if is_bfloat16(got.dtype):
            rtol, atol = max(rtol, 2**-7), max(atol, 2**-7)
        np.testing.assert_allclose(
            got.astype(np.float64), np.asarray(want, dtype=np.float64), rtol, atol, err_msg=what
        )
    else:
        np.testing.assert_array_equal(got, want, err_msg=what)


def expected(case: OpCase, inputs: Sequence[Any]) -> list[Any]:
    with np.errstate(all="ignore"):
        result = case.reference(*map(gradient_check.double, copies(inputs)))
    return list(result) if isinstance(result, (tuple, list)) else [result]


def check_values(case: OpCase) -> None:
    """Schema, inferred against actual shapes, values, inputs unchanged."""
    inputs = copies(case.inputs)
    definition = case.definition()
    outputs = execute(definition, inputs)
    for i, (before, after) in enumerate(zip(case.inputs, inputs, strict=True)):
        if isinstance(before, np.ndarray) and definition.input[i] not in definition.output:
            np.testing.assert_array_equal(after, before, err_msg=f"input {i} was changed")
    assert case.reference or case.check, "a case needs a reference or a check"
    if case.check is not None:
        case.check(outputs, copies(case.inputs))
    if case.reference is not None:
        wanted = expected(case, case.inputs)
        assert len(wanted) == len(outputs), f"the reference gives {len(wanted)} outputs of {len(outputs)}"
        for o, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
            if want is not None:
                assert np.shape(want) == got.shape, (
                    f"output {o} is {got.shape}, the reference {np.shape(want)}"
                )
                assert_same(got, want, case.rtol, case.atol, f"output {o}")


def strided(x: Any) -> Any:
    """The same values with gaps between them and the first dimension innermost."""
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        return x
    wide = np.zeros((*x.shape[1:], 2 * x.shape[0]), dtype=x.dtype)
    view = np.moveaxis(wide[..., ::2], -1, 0)
    view[...] = x
    return view


def check_strided(case: OpCase) -> None:
    """Non-contiguous inputs give the same outputs."""
    want = execute(case.definition(), copies(case.inputs))
    got = execute(case.definition(), [strided(x) for x in copies(case.inputs)])
    compare_outputs(case, got, want)


def compare_outputs(case: OpCase, got: Sequence[Any], want: Sequence[Any]) -> None:
    for o, (a, b) in enumerate(zip(got, want, strict=True)):
        if isinstance(b, np.ndarray):
            assert_same(a, b, case.rtol, case.atol, f"output {o}")


def check_inplace(case: OpCase) -> None:
    """Every in-place pair of the schema whose shapes allow it gives the outputs of separate buffers."""
    op = Operator(case.definition())
    want = execute(case.definition(), copies(case.inputs))
    if op.dynamic:
        return
    for i in range(len(case.inputs)):
        for o in range(case.outputs):
            x, y = case.inputs[i], want[o]
            if (i, o) not in op.schema.inplace or op.outputs[o] in op.inputs or not isinstance(x, np.ndarray):
                continue
            if (x.nbytes, x.dtype) == (y.nbytes, y.dtype):
                got = execute(case.definition({o: i}), copies(case.inputs))
                compare_outputs(case, got, want)


def check_empty(case: OpCase) -> None:
    """A dimension of 0 in front: shapes as inferred, and the reference's values where it can say."""
    if case.empty is False:
        return
    first = np.shape(case.inputs[0]) if case.inputs else ()
    if not first:
        return
    chosen = (
        case.empty
        if isinstance(case.empty, tuple)
        else [i for i, x in enumerate(case.inputs) if np.shape(x) == first]
    )
    inputs = [x[:0] if i in chosen else x for i, x in enumerate(copies(case.inputs))]
    outputs = execute(case.definition(), inputs)
    if case.reference is None:
        return
    try:
        wanted = expected(case, inputs)
    except (ValueError, IndexError, ZeroDivisionError, FloatingPointError):
        return
    for o, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
        if want is not None and np.shape(want) == got.shape:
            assert_same(got, want, case.rtol, case.atol, f"output {o} of an empty input")


def check_gradient(case: OpCase) -> None:
    """Analytic gradients against central differences in float64: relative 1e-4, absolute 1e-7."""
    definition = case.definition()
    if not gradient_check.has_gradient(definition) or case.gradient == ():
        return
    of = None if case.grad_outputs is None else [definition.output[o] for o in case.grad_outputs]
    gradient_check.check_gradient(definition, case.inputs, wrt=case.gradient, of=of)


def check_raises(case: OpCase) -> None:
    """The error names the operator and says what is wrong."""
    kind, message = case.raises
    workspace = gpunet.Workspace("cpu")
    text = None
    try:
        definition = case.definition()
        gradient_check.feed(workspace, definition.input, case.inputs)
        workspace.run_operator(definition)
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind.__name__} was raised"
    assert message in text, f"message {text!r} lacks {message!r}"
    assert f"[{case.type}]" in text, f"message {text!r} does not name the operator"

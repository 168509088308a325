"""Every declared instance of every CUDA kernel runs on the simulated device and agrees with NumPy.

The rows of test_sim_operators.py are in few element types. Here those rows are taken in others that reach
instances which the tables leave out: found by binding rows, which names the kernels that they would launch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpunet import backends, kernels
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import launch, signature, sources
from gpunet.cuda_kernels.signature import FLOATS, HALVES
from gpunet.cuda_kernels.sim import toolchain
from gpunet.cuda_kernels.sim_backend import SimBackend
from gpunet.devices import Device
from gpunet.dtypes import as_dtype
from gpunet.errors import GpunetError
from gpunet.operator import Operator
from gpunet.proto import OperatorDef
from tests.op_check import copies, make_operator
from tests.test_sim_operators import (
    BACKWARD,
    FORWARD,
    LARGE,
    assert_agree,
    large_definition,
    run,
    specs_of,
    steps_of,
)

if toolchain.find() is None:
    pytest.skip(toolchain.MISSING, allow_module_level=True)

# Binding every row takes seconds.
pytestmark = pytest.mark.slow

#: Modules whose kernels no operator launches by itself, and where they are run in all types.
ELSEWHERE = {"multi_tensor": "test_sim_families.py", "conv_transpose": "test_sim_families.py"}
#: Kernels that run beside plans of cuDNN, on a GPU only: tests of their own below.
BESIDE_CUDNN = {"inverse_deviations", "requantize"}
#: What rows are cast to: all, indices, quantized numbers.
NUMBERS = [*signature.NUMBERS, "bool"]
INDICES = ["int32", "int64"]
BYTES = ["int8", "uint8"]


class Row(NamedTuple):
    """One operator on the simulated device, with what the environment says."""

    definition: OperatorDef
    inputs: list[Any]
    env: Mapping[str, str] = {}


class Recorder(SimBackend):
    """A simulated device that launches nothing: it notes the kernels that launches were prepared of."""

    def __init__(self) -> None:
        super().__init__(Device("sim", 7))
        self.names: set[tuple[str, str]] = set()

    def function(self, module: str, name: str) -> backends.Function:
        self.names.add((module, name))
        return None  # type: ignore[return-value]


def launched(recorder: Recorder, row: Row, patch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(module, function) of the kernels that a row launches; empty where no CUDA kernel takes it."""
    try:
        op = Operator(row.definition)
        specs = specs_of(row.inputs)
        outputs = op.infer(specs)
        if op.schema.host or None in outputs or not kernels.exists(op, "sim"):
            return set()
        if kernels.reason_against(op, "sim", specs, outputs) is not None:
            return set()
    except GpunetError:
        return set()
    outputs = outputs[: len(op.outputs)]
    found = kernels.find(op, "sim", specs, outputs)
    if not found.binds:
        return set()
    wanted = found.scratch(op, specs, outputs) if found.scratch else ()
    context = kernels.KernelContext(op, backend=recorder, stream=recorder.stream)
    context.scratch = tuple(Buffer.empty(recorder, s) for s in wanted)
    context.step_buffer = Buffer.empty(recorder, specs_of([np.zeros(1, np.uint64)])[0])
    given, made = (tuple(Buffer.empty(recorder, s) for s in group) for group in (specs, outputs))
    recorder.names = set()
    with patch.context() as changed:
        for name, value in row.env.items():
            changed.setenv(name, value)
        found.function(given, made, op.args, context)
    return recorder.names


def table() -> Iterator[Row]:
    """The rows of test_sim_operators.py, and those that have our own kernels run where a library does."""
    for case in FORWARD:
        yield Row(case.definition(), list(case.inputs))
    for case in BACKWARD:
        yield from (Row(step, inputs) for step, inputs in steps_of(case))
    for type, inputs, args in LARGE:
        yield Row(large_definition(type, inputs, args), inputs)


def without_libraries(row: Row) -> Iterator[Row]:
    if row.definition.type.startswith("Conv"):
        direct = OperatorDef()
        direct.CopyFrom(row.definition)
        direct.engine = "DIRECT"
        yield row._replace(definition=direct)
    elif row.definition.type.startswith(("MatMul", "BatchMatMul", "FC")):
        yield row._replace(env={"GPUNET_GEMM": "kernel"})


def others() -> Iterator[Row]:
    """Rows that take kernels for sizes and shapes which the tables do not have in all types."""
    rng = np.random.default_rng(5)

    def of(type: str, *shapes: tuple[int, ...], outputs: int = 1, **args: Any) -> Row:
        inputs = [rng.integers(1, 100, shape).astype(np.float32) for shape in shapes]
        names = [f"in{i}" for i in range(len(shapes))], [f"out{o}" for o in range(outputs)]
        return Row(make_operator(type, *names, **args), inputs)

    yield of("ReduceSum", (20_011,), axes=[0])
    yield of("ReduceMax", (20_011,), axes=[0])
    yield of("AveragePool", (1, 2, 40, 40), global_pooling=1)
    yield of("MaxPool", (1, 2, 40, 40), global_pooling=1)
    yield of("TopK", (2, 300), k=150, outputs=2)
    yield of("Transpose", (70, 90), axes=[1, 0])
    for type in ("ArgMax", "ArgMin"):
        yield of(type, (2, 5000), axis=1)
    turns = (3, 1, 5, 1, 7, 1), (1, 4, 1, 6, 1, 2)
    for a, b in (turns, ((3, 40), (40,)), ((40,), (3, 40)), ((3, 1), (1, 40)), ((3, 5000), (3, 1))):
        full = np.broadcast_shapes(a, b)
        for row in (
            of("MulGradient", full, a, b, outputs=2),
            of("DivGradient", full, a, b, full, outputs=2),
        ):
            yield from (row._replace(inputs=[x.astype(as_dtype(t)) for x in row.inputs]) for t in FLOATS)
    quotient = of("Div", *turns)
    yield quotient._replace(inputs=[x.astype(np.int32) for x in quotient.inputs])
    yield of("Div", (3, 5), (3, 5), epsilon=0.5)
    yield of("Rsqrt", (3, 5), epsilon=0.5)
    alpha = of("SparseFtrl", (5, 3), (5, 3, 2), (4,), (4, 3), (1,), outputs=2)
    alpha.definition.output[:] = alpha.definition.input[:2]
    alpha.inputs[2] = np.array([4, 0, 4, 2], np.int32)
    yield alpha
    for dtype in HALVES:
        yield of("Float16UniformFill", shape=[1031], min=-1.0, max=2.0, dtype=dtype)
    yield from without_libraries(of("ConvGradient", (2, 1, 40, 40), (1, 1, 3, 3), (2, 1, 38, 38), no_bias=1))
    for rows, units in ((3000, 5), (40, 300), (3000, 300)):
        yield of("FCGradient", (rows, 2), (units, 2), (rows, units), outputs=2)
    for dtype in ("int8", "int16", "int32"):
        yield of("DiagonalFill", shape=[5, 5], value=1, dtype=dtype)
        filled = of("ConstantFill", (3, 5), (1,), dtype=dtype)
        yield filled._replace(inputs=[filled.inputs[0], np.array([3], dtype)])
    spread = of("And", (3, 1, 5, 1, 7, 1), (1, 4, 1, 6, 1, 2))
    yield spread._replace(inputs=[x > 50 for x in spread.inputs])
    soft = of("SoftmaxWithLoss", (6, 5), (6, 5), outputs=2, label_prob=1)
    yield soft._replace(
        inputs=[soft.inputs[0] / 100, np.eye(6, 5, -1, np.float32) + np.eye(6, 5, 4, np.float32)]
    )


def variants(row: Row) -> Iterator[Row]:
    """The row with inputs in other types: floats, scalars among them alone, indices."""
    arrays = [(i, x) for i, x in enumerate(row.inputs) if isinstance(x, np.ndarray)]
    floats = [i for i, x in arrays if x.dtype.name in signature.FLOATS]
    scalars = [i for i in floats if row.inputs[i].size == 1]
    indices = [i for i, x in arrays if x.dtype.name in INDICES]
    vectors = [i for i in floats if i not in scalars]
    groups = [floats, scalars, vectors, floats[:1], *([i] for i in scalars), [i for i, _ in arrays]]
    groups += [[i for i in floats if i != other] for other in scalars]
    for chosen, name, index in itertools.product(groups, NUMBERS, [None, *INDICES]):
        if not chosen:
            continue
        inputs = copies(row.inputs)
        with np.errstate(all="ignore"):
            for i in indices if index is not None else ():
                inputs[i] = inputs[i].astype(index)
            for i in chosen:
                inputs[i] = inputs[i].astype(as_dtype(name))
        yield row._replace(inputs=inputs)
    words = [i for i, x in arrays if x.dtype.name in BYTES]
    for names in itertools.product(BYTES, repeat=len(words)) if 0 < len(words) <= 5 else ():
        inputs = copies(row.inputs)
        for i, name in zip(words, names, strict=True):
            inputs[i] = inputs[i].astype(name)
        yield row._replace(inputs=inputs)
    for name, arg in itertools.product(NUMBERS, row.definition.arg):
        if arg.name in ("dtype", "to"):
            changed = OperatorDef()
            changed.CopyFrom(row.definition)
            for each in changed.arg:
                if each.name == arg.name:
                    each.Clear()
                    each.name, each.s = (
                        arg.name,
                        {"float32": "float", "float64": "double"}.get(name, name).encode(),
                    )
            yield row._replace(definition=changed)


def declared() -> dict[tuple[str, str], tuple[str, str]]:
    """(module, function) of every instance, with (module, kernel)."""
    kernels.load("sim")
    return {
        (kernel.module, kernel.function_name(*types)): (kernel.module, kernel.name)
        for kernel in signature.declared.values()
        if kernel.module not in sources._registered and kernel.module not in ELSEWHERE
        if kernel.name not in BESIDE_CUDNN
        for types in kernel.instances()
    }


@functools.cache
def plan() -> tuple[list[tuple[Row, set[tuple[str, str]]]], set[tuple[str, str]]]:
    """Rows that reach what the tables leave out, each with the instances that it is there for; and the
    instances that no row reaches.
    """
    owner, recorder, patch = declared(), Recorder(), pytest.MonkeyPatch()
    first: list[tuple[Row, set[tuple[str, str]]]] = [(row, launched(recorder, row, patch)) for row in table()]
    missing = set(owner).difference(*(names for _, names in first))
    more = [*itertools.chain.from_iterable(without_libraries(row) for row, _ in first), *others()]
    chosen: list[tuple[Row, set[tuple[str, str]]]] = []
    added = [(row, launched(recorder, row, patch)) for row in more]
    for row, names in added:
        if names & missing and computes(row):
            chosen.append((row, names & missing))
            missing -= names
    for row, names in (*first, *added):
        families = {owner[name] for name in names if name in owner}
        if not any(owner[name] in families for name in missing):
            continue
        for variant in variants(row):
            found = launched(recorder, variant, patch) & missing
            if found and computes(variant):
                chosen.append((variant, found))
                missing -= found
    return chosen, missing


def computes(row: Row) -> bool:
    """Whether the CPU runs the row: whole numbers in the place of others can be divided by 0."""
    try:
        run(row.definition, copies(row.inputs), "cpu")
    except GpunetError:
        return False
    return True


@pytest.mark.parametrize("module", sorted({m for m, _ in signature.declared if m not in sources._registered}))
def test_instances(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a module that no row of test_sim_operators.py launches, and whether any is left."""
    if module in ELSEWHERE:
        return
    rows, missing = plan()
    for row, names in rows:
        if not any(owner == module for owner, _ in names):
            continue
        want = run(row.definition, copies(row.inputs), "cpu")
        with monkeypatch.context() as changed:
            for name, value in row.env.items():
                changed.setenv(name, value)
            got = run(row.definition, copies(row.inputs), "sim:0")
        assert_agree(row.definition.type, got, want)
    assert sorted(name for owner, name in missing if owner == module) == []


def launched_on_sim(
    kernel: signature.Kernel, types: tuple[np.dtype, ...], inputs: Sequence[Any], y: np.ndarray, *numbers: Any
) -> np.ndarray:
    """What a kernel writes to an array like ``y``, its last pointer; None is a null pointer."""
    sim = backends.backend(Device("sim", 0))
    context = kernels.KernelContext(
        Operator(make_operator("Relu", ["x"], ["y"])), backend=sim, stream=sim.stream
    )
    given = [None if x is None else Buffer.from_numpy(sim, x, f"in{i}") for i, x in enumerate(inputs)]
    target = Buffer.from_numpy(sim, np.zeros_like(y), "y")
    arguments = (*given, target, y.size, *numbers)
    launch.prepare(context, kernel, types, arguments, launch.elementwise(y.size))()
    sim.stream.synchronize()
    return target.numpy()


@pytest.mark.parametrize("size", [1, 255, 1031])
def test_inverse_deviations(size: int) -> None:
    kernels.load("sim")
    x = np.random.default_rng(size).uniform(0.01, 50, size).astype(np.float32)
    got = launched_on_sim(signature.declared["layer_norm", "inverse_deviations"], (), [x], x)
    np.testing.assert_array_equal(got, 1 / x)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", [1, 4])
@pytest.mark.parametrize("name", BYTES)
def test_requantize(name: str, scales: int, with_bias: bool) -> None:
    """Rounded to even and saturated, of the sums of 3 images, 4 filters, 35 windows."""
    kernels.load("sim")
    rng = np.random.default_rng(scales)
    dtype, shape = np.dtype(name), (3, 4, 35)
    sums = rng.integers(-20_000, 20_000, shape).astype(np.int32)
    bias = rng.integers(-5_000, 5_000, 4).astype(np.int32) if with_bias else None
    x_scale, y_scale = np.array([0.03], np.float32), np.array([0.7], np.float32)
    w_scale, zero = rng.uniform(0.3, 0.6, scales).astype(np.float32), np.array([3], dtype)
    got = launched_on_sim(
        signature.declared["quantization", "requantize"],
        (dtype,),
        [sums, x_scale, w_scale, y_scale, zero, bias],
        np.zeros(shape, dtype),
        *(shape[1], shape[2], int(scales > 1)),
    )
    whole = sums if bias is None else sums + bias[:, None]
    factor = x_scale[0] * w_scale / y_scale[0]
    limits = np.iinfo(dtype)
    want = np.clip(np.rint(whole * factor.reshape(-1, 1)) + 3, limits.min, limits.max)
    assert {int(want.min()), int(want.max())} == {limits.min, limits.max}
    np.testing.assert_array_equal(got, want.astype(dtype))

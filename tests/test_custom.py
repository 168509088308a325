"""Operators of one's own: the example, what is refused, and what `gpunet check-grad` finds."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gpunet
from gpunet import custom, gradient_check, operator_check, schema
from gpunet.arguments import Float
from gpunet.cli import main
from gpunet.cuda_kernels import nvrtc, signature
from gpunet.definitions import make_operator
from gpunet.errors import DataTypeError, DeviceError, GradientError, KernelError, SchemaError, ShapeError
from gpunet.specs import spec
from tests.nets import DEVICES
from tests.sim_kernels import needs_compiler

pytestmark = pytest.mark.usefixtures("own_registries")
ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "custom_operator.py"


def run(device: str, type: str, *inputs: Any, outputs: int = 1, **args: Any) -> list[np.ndarray]:
    definition = make_operator(
        type, [f"in{i}" for i in range(len(inputs))], [f"out{o}" for o in range(outputs)], **args
    )
    return gradient_check.run(definition, inputs, device)


def example(device: str) -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['x', {device!r}]; " + (
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )


def test_the_example_is_short() -> None:
    text = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)[2]
    assert len([line for line in text.splitlines() if line.strip()]) < 30


@needs_compiler
def test_a_workspace_on_the_simulated_device_names_what_a_kernel_does_wrong() -> None:
    source = """
    #include "gpunet.cuh"
    extern "C" __global__ void shifted_f32(const float* x, float* y, int64 n) {
      GPUNET_LOOP(i, n) y[i + 40] = x[i];
    }
    """
    custom.operator("Shifted", numpy=lambda *given: None, cuda=source, types=["float32"])
    ws = gpunet.Workspace(device="sim:0")
    ws.feed("images", np.ones((10, 100), np.float32))
    net = gpunet.proto.NetDef(name="n", op=[make_operator("Shifted", ["images"], ["moved"])])
    ws.create(net)
    with pytest.raises(KernelError) as found:  # noqa: PT012 (launches run when something waits for them)
        ws.run("n")
        ws.fetch("moved")
    assert (
        "kernel 'shifted_f32' (custom_shifted.cu), block (3, 0, 0), thread (192, 0, 0): wrote element 1000 "
        "of argument 'Y', buffer 'moved' (float32 10x100): valid are 0 to 999"
    ) in str(found.value)


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_runs(device: str) -> None:
    done = example(device)
    assert done.returncode == 0, done.stderr
    x = np.linspace(-4, 4, 5)
    found = [float(word) for word in done.stdout.strip("[]\n").split()]
    np.testing.assert_allclose(found, x / (1 + np.exp(-x)), rtol=1e-5)


@needs_compiler
def test_the_example_is_right() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from gpunet.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "check-grad", "examples.custom_operator:Swish", "--device", "sim:0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SwishGradient" in done.stdout
    assert "checks of Swish, 0 failed" in done.stdout


def test_the_example_compiles_for_gpus() -> None:
    try:
        nvrtc.bindings()
        nvrtc.headers()
    except DeviceError as error:
        pytest.skip(str(error))
    runpy.run_path(str(EXAMPLE))
    ((module, _),) = {(m, n) for m, n in signature.declared if n == "swish"}
    suffixes = ("f16", "bf16", "f32", "f64")
    wanted = {f"swish{part}_{suffix}" for part in ("", "_gradient") for suffix in suffixes}
    assert set(nvrtc.declared_functions(module)) == wanted
    for architecture in (75, 80, 90, 100):
        assert nvrtc.functions(nvrtc.compile_module(module, architecture).code) == wanted


SHIFT = """
#include "gpunet.cuh"
#define SHIFT(S, T)                                                                        \\
  extern "C" __global__ void affine_##S(const T* x, T* y, int64 n, double slope, int32 up) { \\
    GPUNET_LOOP(i, n) store(y, i, load(x, i) * slope + up);                                  \\
  }
SHIFT(f32, float)
SHIFT(f64, double)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_and_scalars(device: str) -> None:
    custom.operator(
        "Affine",
        args=[Float("slope", 2.0, "factor")],
        numpy=lambda x, slope: x * slope + 3,
        cuda=SHIFT,
        parameters="const T* x, T* y, int64 n, double slope, int32 up",
        types=("float32", "float64"),
        scalars=lambda inputs, outputs, args: {"up": 3},
        inplace=[(0, 0)],
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(run(device, "Affine", x, slope=4.0)[0], x * 4 + 3)
    np.testing.assert_array_equal(run(device, "Affine", x.astype(np.float64))[0], x * 2.0 + 3)
    assert run(device, "Affine", x[:0])[0].shape == (0, 3)
    half = x.astype(np.float16)
    np.testing.assert_array_equal(run("cpu", "Affine", half)[0], half * 2 + 3)
    if device != "cpu":
        with pytest.raises(DeviceError, match="'affine' is made for T of float32, float64, found float16"):
            run(device, "Affine", half)
    with pytest.raises(DataTypeError, match=r"input X .* is int32 2x3, wanted one of .*float32, float64"):
        run(device, "Affine", x.astype(np.int32))


REVERSE = """
#include "gpunet.cuh"
extern "C" __global__ void reverse_rows(const int32* x, int32* y, int64 width) {
  __shared__ int32 row[64];
  const int64 at = blockIdx.x * width + threadIdx.x;
  if (threadIdx.x < width) row[threadIdx.x] = x[at];
  BARRIER
  if (threadIdx.x < width) y[at] = row[width - 1 - threadIdx.x];
}
"""


def reverse_rows(type: str, source: str | Path, numpy: Any = lambda x: x[:, ::-1]) -> None:
    custom.operator(
        type,
        numpy=numpy,
        cuda=source,
        function="reverse_rows",
        parameters="const int32* x, int32* y, int64 width",
        scalars=lambda inputs, outputs, args: {"width": inputs[0].shape[1]},
        grid=lambda inputs, outputs, args: (inputs[0].shape[0], 64),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_source_file_and_a_grid(device: str, tmp_path: Path) -> None:
    path = tmp_path / "own_reverse.cu"
    path.write_text(REVERSE.replace("BARRIER", "__syncthreads();"))
    reverse_rows("ReverseRows", path)
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    np.testing.assert_array_equal(run(device, "ReverseRows", x)[0], x[:, ::-1])


@needs_compiler
def test_check_grad_finds_a_missing_barrier() -> None:
    reverse_rows("Racing", REVERSE.replace("BARRIER", ""))
    failed = [o for o in check("Racing", "int32:3x9") if o.status == operator_check.FAILED]
    assert failed[-1].check == "threads on sim:0"
    assert "a barrier or an atomic is missing" in failed[-1].detail


def check(type: str, *texts: str, devices: tuple[str, ...] = ("sim:0",)) -> list[operator_check.Outcome]:
    return operator_check.check_operator(type, operator_check.samples(type, texts), devices)


def cubes(type: str, factor: int = 3, power: str = "x * x * x") -> None:
    """The third power, with faults; devices keep a module by its name, so each variant has its own."""
    name = type.lower()
    source = f"""
    #include "vector.cuh"
    GPUNET_UNARY({name}, {power})
    GPUNET_BINARY({name}_gradient, x, dy, {factor} * x * x * dy)
    """
    custom.operator(
        f"{type}Gradient",
        inputs=["X", "dY"],
        outputs=["dX"],
        numpy=lambda x, dy: factor * x * x * dy,
        cuda=source,
    )
    custom.operator(type, numpy=lambda x: x * x * x, cuda=source, gradient=f"{type}Gradient")


@needs_compiler
@pytest.mark.parametrize(
    ("type", "options", "failing", "detail"),
    [
        ("Cubes", {}, set(), ""),
        ("Steepcubes", {"factor": 4}, {"gradient"}, "(the difference quotient)"),
        ("Flatcubes", {"power": "x * x"}, {"sim:0"}, "of 20 elements differ, the first at"),
    ],
    ids=["right", "wrong gradient", "wrong kernel"],
)
def test_check_grad_tells_what_is_wrong(type: str, options: Any, failing: set[str], detail: str) -> None:
    cubes(type, **options)
    outcomes = check(type, "4x5")
    failed = [o for o in outcomes if o.status == operator_check.FAILED]
    assert {o.check for o in failed} == failing
    assert all(detail in o.detail and o.operator == type for o in failed)
    assert {o.check for o in outcomes} == {"gradient", "sim:0", "threads on sim:0"}
    assert {o.operator for o in outcomes} == {type, f"{type}Gradient"}


def test_a_gradient_finds_its_inputs_by_name() -> None:
    cubes("Cubes")
    made, grads = gpunet.gradient_ops(make_operator("Cubes", ["x"], ["y"]), {"y": "y_grad"})
    assert grads == {"x": "x_grad"}
    assert [(op.type, list(op.input), list(op.output)) for op in made] == [
        ("CubesGradient", ["x", "y_grad"], ["x_grad"])
    ]


REFUSED = {
    "one pointer less": (
        {"inputs": ["A", "B"], "parameters": "const T* a, T* y, int64 n"},
        "2 pointers are declared, wanted 2 for the inputs and 1",
    ),
    "an input that is written": ({"parameters": "T* x, T* y, int64 n"}, "'x' is an input, wanted a const"),
    "an output that is not": ({"parameters": "const T* x, const T* y"}, "'y' is an output, wanted a pointer"),
    "a scalar from nowhere": (
        {"parameters": "const T* x, T* y, int64 m"},
        "scalar 'm' is unknown, wanted n, or scalars=...",
    ),
    "an unknown type": ({"parameters": "const U* x, T* y"}, "parameter 'x' has unknown type 'U'"),
    "a variadic input": (
        {"inputs": [schema.Input("X", variadic=True)]},
        "'X' is optional or variadic, which only a launcher of your own can take",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_whole(options: dict[str, Any], message: str) -> None:
    before = set(schema.registered_types()), set(signature.declared)
    with pytest.raises(SchemaError, match=".*" + message.replace("...", r"\.\.\.")):
        custom.operator("Broken", numpy=np.abs, cuda='#include "gpunet.cuh"', **options)
    assert (set(schema.registered_types()), set(signature.declared)) == before


def test_names_that_are_taken() -> None:
    with pytest.raises(SchemaError, match="'Relu' is already registered"):
        custom.operator("Relu", numpy=np.abs)
    with pytest.raises(FileNotFoundError):
        custom.operator("Broken", numpy=np.abs, cuda="not_there.cu")


def test_a_numpy_function_that_lies() -> None:
    custom.operator("Fewer", outputs=["Y", "Z"], numpy=lambda x: x)
    custom.operator("Shorter", numpy=lambda x: x[1:])
    custom.operator("Complex", numpy=lambda x: x * 1j)
    x = np.ones(3, np.float32)
    with pytest.raises(KernelError, match=r"\[Fewer\].*returned 1 arrays, wanted 2"):
        run("cpu", "Fewer", x, outputs=2)
    with pytest.raises(KernelError, match=r"\[Shorter\].*returned Y of shape \(2,\), wanted \(3,\)"):
        run("cpu", "Shorter", x)
    with pytest.raises(DataTypeError, match=r"\[Complex\].*returned Y as complex64, wanted float32"):
        run("cpu", "Complex", x)


def test_inputs_must_be_alike_by_default() -> None:
    custom.operator("Mean2", inputs=["A", "B"], numpy=lambda a, b: (a + b) / 2)
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ShapeError, match=r"input B \(float32 3\) does not fit, wanted 2x3"):
        run("cpu", "Mean2", x, x[0])
    with pytest.raises(DataTypeError, match="differs in type"):
        run("cpu", "Mean2", x, x.astype(np.float64))
    custom.operator(
        "Total",
        infer=lambda op, inputs: [spec((), inputs[0].dtype)],
        numpy=np.sum,
    )
    assert run("cpu", "Total", x)[0] == 6


def test_gradient_operators_with_names_that_say_nothing() -> None:
    custom.operator("OddGradient", inputs=["X", "error"], outputs=["dX"], numpy=lambda x, e: x)
    custom.operator("Odd", numpy=np.abs, gradient="OddGradient")
    definition = make_operator("Odd", ["x"], ["y"])
    with pytest.raises(
        GradientError, match="input 'error' of 'OddGradient' is unknown here, wanted one of X, Y, dY"
    ):
        gpunet.gradient_ops(definition, {"y": "y_grad"})


# ---- the command ----


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["check-grad", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_check_grad_of_a_module_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_operators.py").write_text(
        "from gpunet import custom\n"
        "custom.operator('WrongGradient', inputs=['X', 'dY'], outputs=['dX'], numpy=lambda x, dy: dy)\n"
        "custom.operator('Wrong', numpy=lambda x: 2 * x, gradient='WrongGradient')\n"
    )
    shown = invoke("own_operators:Wrong", "--shape", "3x2", code=1)
    assert "checks of Wrong, 1 failed" in shown
    assert "gradient of input 0" in " ".join(shown.split())


@needs_compiler
def test_check_grad_of_built_in_operators() -> None:
    assert "checks of Relu, 0 failed" in invoke("Relu")
    shown = invoke("TopK", "--shape", "3x4", "--arg", "k=2", "--device", "sim:0")
    assert "3x4 k=2" in shown
    assert "TopKGradient" in shown
    assert "checks of Conv, 0 failed" in invoke("Conv", "--engine", "DIRECT")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Rellu"], "unknown operator type 'Rellu'; did you mean Relu?"),
        (["nowhere:X"], "cannot import module 'nowhere' of 'nowhere:X'"),
        (["Relu", "--shape", "2xx3"], "cannot read the input '2xx3'"),
        (["Relu", "--shape", "tiny:3"], "unknown type 'tiny'"),
        (["TopK"], "argument 'k' is 0"),
        (["Relu", "--device", "tpu:0"], "unknown device 'tpu:0'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_check_grad_says_what_it_wants(arguments: list[str], message: str) -> None:
    assert message in invoke(*arguments, code=1)


def test_check_grad_refuses_options() -> None:
    assert "wanted NAME=VALUE" in invoke("TopK", "--arg", "k", code=2)
    assert "is what others are compared with" in invoke("Relu", "--device", "cpu", code=2)

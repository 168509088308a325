"""bfloat16 on devices: training with the CPU's losses, rounding, fused kernels, copies."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import mixed_precision
from gpunet.backends import backend
from gpunet.buffers import Buffer
from gpunet.cuda_kernels import signature
from gpunet.definitions import make_operator
from gpunet.devices import parse_device
from gpunet.dtypes import bfloat16
from gpunet.errors import DataTypeError
from gpunet.proto import NetDef
from tests.sim_kernels import needs_compiler


def losses(
    device: str, name: str, steps: int, side: int = 8, batches: int = 4, norm: str = "", **options: Any
) -> list[float]:
    """The losses of training in bfloat16; ``norm`` is the engine of batch normalization."""
    model = gpunet.zoo.build(name, (1, side, side), 10)
    for op in model.net.proto.op:
        if op.type == "SpatialBN":
            op.engine = norm
    mixed_precision.to_half(model, "bfloat16")
    model.add_gradients("loss")
    gpunet.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-4).apply(model)
    ws = gpunet.Workspace(device, seed=1)
    ws.run_once(model.init_net)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(batches, 8, 1, side, side)).astype(np.float32)
    label = rng.integers(0, 10, (batches, 8)).astype(np.int32)
    ws.feed("data", data[0])
    ws.feed("label", label[0])
    ws.create(model.net, **options)
    result = []
    for step in range(steps):
        ws.feed("data", data[step % batches])
        ws.feed("label", label[step % batches])
        ws.run(model.net)
        result.append(float(ws.fetch("loss")))
    return result


@needs_compiler
@pytest.mark.parametrize("engine", ["simple", "graph"])
@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_training_equals_the_cpu_to_the_bit(name: str, engine: str) -> None:
    found, want = (losses(device, name, 20, engine=engine) for device in ("sim:0", "cpu"))
    assert found == want


@needs_compiler
def test_training_of_a_residual_network_equals_the_cpu_to_the_bit() -> None:
    """With batch normalization by cuDNN, in whose place the simulated device has the CPU's kernel."""
    found, want = (losses(device, "resnet20", 3, 16, 1, "CUDNN") for device in ("sim:0", "cpu"))
    assert found == want
    assert found[-1] < found[0]


@needs_compiler
def test_training_of_a_residual_network_is_close_to_the_cpu() -> None:
    """Not to the bit: the sums of our own batch normalization, in float32, have another order, and the last
    of their 24 bits can decide how an activation is rounded to 8. Later steps make the difference larger.
    """
    found, want = (losses(device, "resnet20", 2, 16, 1) for device in ("sim:0", "cpu"))
    np.testing.assert_allclose(found[0], want[0], rtol=1e-2)
    np.testing.assert_allclose(found, want, rtol=1e-1)


def bits(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32).view(np.float32)


@needs_compiler
def test_rounding() -> None:
    """To the nearest, ties to even; what is too large is infinite; a NaN stays one, whatever its bits."""
    rng = np.random.default_rng(3)
    ties = bits(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F7FFF, 0x7F7F8000)
    special = bits(0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x80000000)
    small = bits(0x00000001, 0x00008000, 0x00018000)
    x = np.concatenate([ties, special, small, rng.integers(0, 2**32, 4000, np.uint32).view(np.float32)])
    ws = gpunet.Workspace("sim:0", strict=True)
    ws.feed("x", x)
    ws.run_operator(make_operator("Cast", ["x"], ["y"], to="bfloat16"))
    ws.run_operator(make_operator("Cast", ["y"], ["z"], to="float"))
    y, z = ws.fetch("y"), ws.fetch("z")
    number = ~np.isnan(x)
    assert y.dtype == bfloat16()
    with np.errstate(invalid="ignore"):
        want = x.astype(bfloat16())
    np.testing.assert_array_equal(y.view(np.uint16)[number], want.view(np.uint16)[number])
    assert np.isnan(z[~number]).all()
    np.testing.assert_array_equal(z[number], want.astype(np.float32)[number])


@needs_compiler
def test_numbers_in_float64_are_rounded_by_way_of_float32() -> None:
    """As ml_dtypes does: it shows where the float32 is a tie."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40])
    ws = gpunet.Workspace("sim:0", strict=True)
    ws.feed("x", x)
    ws.run_operator(make_operator("Cast", ["x"], ["y"], to="bfloat16"))
    np.testing.assert_array_equal(ws.fetch("y").astype(np.float64), [1.0, 1 + 2.0**-6])


@needs_compiler
def test_fused_operators_round_in_between() -> None:
    """A fused kernel has the bits of its operators one by one."""
    steps = [
        make_operator("Mul", ["x", "y"], ["a"]),
        make_operator("Sigmoid", ["a"], ["b"]),
        make_operator("Add", ["b", "y"], ["c"]),
        make_operator("Clip", ["c"], ["d"], max=1.25),
        make_operator("Cast", ["d"], ["e"], to="float"),
        make_operator("Sqr", ["e"], ["f"]),
        make_operator("Cast", ["f"], ["g"], to="bfloat16"),
    ]
    rng = np.random.default_rng(4)
    x, y = (rng.normal(size=(37, 5)).astype(bfloat16()) for _ in range(2))
    fused, single = (gpunet.Workspace("sim:0", strict=True) for _ in range(2))
    for ws in (fused, single):
        ws.feed("x", x)
        ws.feed("y", y)
    fused.create(NetDef(name="chain", op=steps, external_output=["g"]))
    fused.run("chain")
    nodes = [node for part in fused.program("chain").segments() for node in part.compiled.graph.nodes]
    assert "FusedElementwise" in {node.op.type for node in nodes if node.op is not None}
    for step in steps:
        single.run_operator(step)
    assert fused.fetch("g").dtype == bfloat16()
    np.testing.assert_array_equal(fused.fetch("g"), single.fetch("g"))


def test_kernels_are_made_for_it() -> None:
    assert "bfloat16" in signature.FLOATS
    assert signature.SUFFIXES[bfloat16()] == ("bf16", "bfloat16")
    assert signature.DEFINES == ("-DGPUNET_BFLOAT16",)


def test_other_packages_get_the_words() -> None:
    """There is no typestr for bfloat16, by which CuPy and others take foreign memory."""
    memory = SimpleNamespace(pointer=256, name="")
    gpu: Any = SimpleNamespace(simulated=False, device=parse_device("cuda:0"))
    buffer = Buffer(gpu, memory, (2, 3), bfloat16(), 16, "x")  # type: ignore[arg-type]
    with pytest.raises(DataTypeError, match=r"'x' is bfloat16.*wanted \.view\(shape, 'uint16'\)"):
        _ = buffer.__cuda_array_interface__
    found = buffer.view(buffer.shape, "uint16").__cuda_array_interface__
    assert (found["typestr"], found["shape"], found["data"]) == ("<u2", (2, 3), (272, False))


@needs_compiler
def test_copies() -> None:
    device = backend(parse_device("sim:0"))
    x = np.arange(7, dtype=np.float32).astype(bfloat16())
    buffer = Buffer.from_numpy(device, x)
    assert buffer.nbytes == 14
    found = buffer.numpy()
    assert found.dtype == bfloat16()
    np.testing.assert_array_equal(found, x)


WITHOUT = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
import gpunet
from gpunet.cuda_kernels import signature
from gpunet.definitions import make_operator
assert signature.FLOATS == ("float32", "float16", "float64")
ws = gpunet.Workspace("sim:0", strict=True)
ws.feed("x", np.array([-1, 2], np.float16))
ws.run_operator(make_operator("Relu", ["x"], ["y"]))
print(ws.fetch("y").tolist())
ws.run_operator(make_operator("Cast", ["x"], ["z"], to="bfloat16"))
"""


@needs_compiler
def test_without_ml_dtypes_kernels_are_made_for_the_other_types() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.stdout == "[0.0, 2.0]\n", done.stderr
    assert "needs the package ml_dtypes" in done.stderr

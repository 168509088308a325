"""Sections of the check on a GPU: whether it computes what the CPU does."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import gpunet
from gpunet import gradient_check
from gpunet.backends import Backend
from gpunet.cuda_kernels import cudnn, nvrtc, signature
from gpunet.cuda_kernels.sim import toolchain
from gpunet.definitions import make_operator
from gpunet.dtypes import BFLOAT16
from gpunet.errors import DeviceError, GpunetError, GradientError
from gpunet.mixed_precision import SKIPPED, add_scaled_gradients, to_half
from gpunet.optimizers import SGD
from gpunet.proto import NetDef
from gpunet.zoo import build

from .gpu_records import Place, Record, failed
from .training import CASES, CLASSES, DECAY, MOMENTUM, RATE, Case, batch

ENGINES = ("simple", "async_scheduling", "graph")
#: The types to train in.
PRECISIONS = ("float32", "float16", *(() if BFLOAT16 is None else ("bfloat16",)))
#: How far losses may be apart, relatively: one sum in another order can round an activation the other way.
HALF_LIMITS = {"float16": 2e-2, "bfloat16": 1e-1}
#: Of so many rows of the operator tables one is looked at in bfloat16 too.
NARROW = 4
#: Of so many rows of each operator type on the simulated device, whose rows the tests run one and all.
SIMULATED_ROWS = 4
#: Algorithms of cuDNN (Winograd, FFT) round more than a plain sum.
LIBRARY_TOLERANCE = 1e-4


def device(place: Place) -> Iterator[Record]:
    """What is there. Raises DeviceError if the device is not."""
    found = place.backend
    free, total = found.memory_info()
    yield Record("device", True, detail=_describe(found))
    if total:
        yield Record("memory", value=total / 2**30, unit="GiB", detail=f"{free / 2**30:.1f} GiB are free")
    for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy", "nvidia-cudnn-frontend", "nvmath-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield Record(name, detail=importlib.metadata.version(name))
    try:
        yield Record("cuDNN", detail=" and front end ".join(cudnn.versions()))
    except DeviceError as error:
        yield Record("cuDNN", detail=str(error))
    try:
        yield Record("NVRTC", detail=".".join(map(str, nvrtc.bindings().getVersion())))
    except DeviceError as error:
        yield Record("NVRTC", detail=str(error))


def _describe(found: Backend) -> str:
    cuda = getattr(found, "cuda", None)
    if cuda is None:
        return f"{found.device}: simulated"
    parts = [f"{found.device}: compute capability {getattr(found, 'capability', 0) / 10}"]
    try:
        name = cuda.runtime.getDeviceProperties(found.device.index)["name"]
        parts.append(name.decode() if isinstance(name, bytes) else str(name))
        parts.append(f"driver for CUDA {cuda.runtime.driverGetVersion() / 1000:g}")
        parts.append(f"runtime of CUDA {cuda.runtime.runtimeGetVersion() / 1000:g}")
    except Exception as error:  # only words are missing then
        parts.append(f"not described: {error}")
    return ", ".join(parts)


def compilation(place: Place) -> Iterator[Record]:
    """Compiles and loads every kernel: what comes later then finds them in the cache."""
    modules = sorted({module for module, _ in signature.declared})
    capability = getattr(place.backend, "capability", None)
    start = time.perf_counter()
    if capability is not None:
        arch = nvrtc.supported(capability)
        # Processes: whatever locks the compiler holds, modules are compiled side by side.
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            cubins = {m: pool.submit(nvrtc.compile_module, m, arch) for m in modules}
        errors = {m: c.exception() for m, c in cubins.items()}
        good = [c.result() for m, c in cubins.items() if errors[m] is None]
        spilled = [name for c in good for name, u in c.usage.items() if u.spill_stores]
        yield Record(
            f"{len(modules)} modules for sm_{arch}",
            value=time.perf_counter() - start,
            unit="s",
            detail=f"{len(spilled)} functions spill registers {' '.join(spilled[:5])}",
        )
    modules = modules[:: 8 if place.quick else 1]
    if place.simulated:
        toolchain.build_runtime()
        with ThreadPoolExecutor(os.cpu_count()) as builds:
            for module in modules:  # what does not build is written down below
                builds.submit(toolchain.build_module, module)
    for index, module in enumerate(modules):
        if place.late:
            left = len(modules) - index
            yield Record("further modules", detail=f"{left} of {len(modules)} were not reached in time")
            return
        yield _loaded(place, module)


def _loaded(place: Place, module: str) -> Record:
    names = sorted(nvrtc.declared_functions(module))
    try:
        for name in names:
            place.backend.function(module, name)
    except GpunetError as error:
        return Record(f"{module}.cu", False, detail=str(error))
    return Record(f"{module}.cu", True, detail=f"{len(names)} functions")


def cases() -> list[Any]:
    """The rows of the operator tables, from the checkout; none where there is no checkout."""
    root = Path(gpunet.__file__).resolve().parent.parent
    folder = root / "tests" / "operators"
    if not folder.is_dir():
        return []
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    found = []
    for path in sorted(folder.glob("cases_*.py")):
        module = importlib.import_module(f"tests.operators.{path.stem}")
        found += [case for case in module.CASES if case.raises is None]
    return found


def in_bfloat16(rows: list[Any], device: str) -> list[Any]:
    """Rows in bfloat16, of operators that run in it on the device."""
    found = []
    for case in rows if BFLOAT16 is not None else []:
        for narrow in case.in_type(BFLOAT16):
            with contextlib.suppress(GpunetError):  # types that do not go together
                if gradient_check.runs_on(narrow.definition(), narrow.inputs, device) is None:
                    found.append(narrow)
    return found


def in_turns(rows: list[Any], most: int | None = None) -> list[Any]:
    """The first row of each operator type, then the second of each and so on: where time ends, all types have
    had their turns. Convolutions, which cuDNN must plan, come last in a turn.

    With ``most`` at most so many rows of each type, from all over its table.
    """
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.type, []).append(row)
    turns = [
        (turn, "Conv" in type, row)
        for type, group in groups.items()
        for turn, row in enumerate(group[:: 1 if most is None else -(-len(group) // most)])
    ]
    return [row for _, _, row in sorted(turns, key=lambda entry: entry[:2])]


def operators(place: Place) -> Iterator[Record]:
    """Each row of the tables, and the operators of its gradient, against the CPU."""
    rows = cases()
    if not rows:
        yield Record("operator tables", detail="not there: this is no checkout, tests/operators is missing")
        return
    rows = rows[:: 37 if place.quick else 1]
    rows += in_bfloat16(rows[::NARROW], place.device)
    whole = len(rows)
    rows = in_turns(rows, SIMULATED_ROWS if place.simulated else None)
    if len(rows) < whole and not place.skip:
        words = f"{len(rows)} of {whole}, at most {SIMULATED_ROWS} of each operator type"
        yield Record("rows on the simulated device", detail=words)
    # The first plan of cuDNN will do.
    os.environ.setdefault("GPUNET_CUDNN_TUNE", "1")
    for index, case in enumerate(rows):
        if place.late:
            yield Record(
                "further rows", detail=f"{len(rows) - index} of {len(rows)} were not reached in time"
            )
            return
        if place.turn(case.name()):
            yield _operator(case, place)


def _operator(case: Any, place: Place) -> Record:
    definition = case.definition()
    least = case.rtol if case.rtol > type(case).rtol else 0.0
    if "Conv" in case.type and not place.simulated:
        least = max(least, LIBRARY_TOLERANCE)
    steps = [(definition, list(case.inputs))]
    of = None if case.grad_outputs is None else [definition.output[o] for o in case.grad_outputs]
    worst, ran = 0.0, []
    try:
        if case.outputs and gradient_check.has_gradient(definition):
            # Where the arguments leave no gradient there is nothing to compare.
            with contextlib.suppress(GradientError):
                steps += gradient_check.gradient_steps(
                    definition, case.inputs, of=of, may_fail=case.gradient == ()
                )
        for step, inputs in steps:
            error = gradient_check.compare_devices(step, inputs, place.device, least)
            if error is not None:
                ran.append(step.type)
                worst = max(worst, error)
    except Exception as error:  # the rows behind it have their turns all the same
        return failed(case.name(), error)
    if not ran:
        why = gradient_check.runs_on(definition, case.inputs, place.device)
        return Record(case.name(), detail=f"stays on the CPU: {why}")
    return Record(case.name(), True, worst, "of the allowed", ", ".join(ran))


def random_bits(place: Place) -> Iterator[Record]:
    """Fills and dropout draw the same bits as on the CPU, step by step, with every engine."""
    size = 1000 if place.quick else 100_001 if place.simulated else 1_000_001
    net = NetDef(
        name="random",
        op=[
            make_operator("UniformFill", [], ["uniform"], shape=[size], min=-1.0, max=2.0),
            make_operator("UniformIntFill", [], ["whole"], shape=[size], min=-5, max=1000),
            make_operator("GaussianFill", [], ["normal"], shape=[size]),
            make_operator("Dropout", ["uniform"], ["kept", "mask"], ratio=0.3),
        ],
    )
    steps = 3

    def draw(name: str, engine: str) -> dict[str, np.ndarray]:
        workspace = gpunet.Workspace(name, seed=9, strict=True)
        workspace.create(net, engine=engine)
        workspace.run("random", steps)
        return {blob: workspace.fetch(blob) for blob in ("uniform", "whole", "normal", "mask")}

    want = draw("cpu", "simple")
    for engine in ENGINES:
        if not place.turn(engine):
            continue
        try:
            found = draw(place.device, engine)
        except Exception as error:
            yield failed(engine, error)
            continue
        for blob, values in want.items():
            differ = int((found[blob] != values).sum())
            close = np.allclose(found[blob], values, rtol=1e-5, atol=1e-6)
            # A normal draw goes through a logarithm and a sine, where libraries differ in the last place.
            good = close if blob == "normal" else differ == 0
            title, words = f"{blob}, step {steps}, {engine}", f"{differ} of {size} elements differ"
            yield Record(title, bool(good), detail=words)


def model(case: Case, precision: str) -> gpunet.Model:
    """A model of the zoo with gradients and updates, to be trained in one of the types :data:`PRECISIONS`."""
    made = build(case.model, (case.channels, case.side, case.side), CLASSES)
    if precision != "float32":
        to_half(made, precision)
    if precision == "float16":
        add_scaled_gradients(made, "loss")
    else:
        made.add_gradients("loss")
    SGD(learning_rate=RATE, momentum=MOMENTUM, weight_decay=DECAY).apply(made)
    return made


def losses(case: Case, device: str, steps: int, precision: str = "float32", **options: Any) -> list[float]:
    """The losses of the first steps."""
    made = model(case, precision)
    workspace = gpunet.Workspace(device, seed=1)
    workspace.run_once(made.init_net)
    gradient_check.feed(workspace, ["data", "label"], batch(case))
    # As where speed counts: with all blobs kept, nothing is fused and channels stay first.
    net = workspace.create(made.net, keep=["loss"], **options)
    found = []
    for _ in range(steps):
        workspace.run(net)
        found.append(float(workspace.fetch("loss")))
    if precision == "float16" and int(workspace.fetch(SKIPPED)[0]):
        raise DeviceError(f"{int(workspace.fetch(SKIPPED)[0])} steps overflowed in float16")
    return found


def training(place: Place) -> Iterator[Record]:
    """LeNet and ResNet-20 have the CPU's losses, in each of the types; in float32 with every engine."""
    steps = 2 if place.small else 8
    for case in CASES:
        case = case._replace(batch=4, side=min(case.side, 16)) if place.small else case
        for precision in PRECISIONS:
            single = precision == "float32"
            want = losses(case, "cpu", steps, precision)
            limit = HALF_LIMITS.get(precision, 1e-5 if place.simulated else 1e-3)
            for engine in ENGINES if single else ("simple",):
                if place.late:
                    yield Record("further nets", detail="not reached in time")
                    return
                title = f"{case.title}, {precision}, {engine}"
                if not place.turn(title):
                    continue
                try:
                    got = losses(case, place.device, steps, precision, engine=engine)
                except Exception as error:
                    yield failed(title, error)
                    continue
                error = float(np.max(np.abs(np.subtract(got, want)) / np.abs(want)))
                shown = f"losses {_shown(got)}, on the CPU {_shown(want)}"
                yield Record(title, bool(error <= limit), error, f"relative, {limit:g} allowed", shown)


def _shown(values: list[float]) -> str:
    return f"{values[0]:.6g} to {values[-1]:.6g}"


def graphs(place: Place) -> Iterator[Record]:
    """A net is captured once and replayed, with the bits of a run that is not captured."""
    case = CASES[0]._replace(batch=4, side=16) if place.small else CASES[0]
    results = {}
    for engine in ("simple", "graph"):
        made = model(case, "float32")
        workspace = gpunet.Workspace(place.device, seed=1)
        workspace.run_once(made.init_net)
        gradient_check.feed(workspace, ["data", "label"], batch(case))
        net = workspace.create(made.net, engine=engine)
        workspace.run(net, 5)
        results[engine] = {p.name: workspace.fetch(p.name) for p in made.params}
        if engine == "graph":
            replays = [getattr(s.execute, "replays", 0) for s in workspace.program(net).segments()]
            words = f"graphs were launched {replays} times"
            yield Record(f"{case.title}, 5 runs", any(replays), detail=words)
    pairs = [(name, x, results["graph"][name]) for name, x in results["simple"].items()]
    different = [name for name, x, y in pairs if not np.array_equal(x, y)]
    words = f"differ in bits: {', '.join(different) or 'none'}"
    yield Record("parameters after 5 steps, graph and simple", not different, detail=words)

"""What holds for every test: one BLAS thread a worker, the same examples in every run, and allowed skips."""

import importlib
import importlib.util
import os
import shutil
import signal
from pathlib import Path

# Before anything imports numpy. Workers of pytest-xdist share the cores, so more threads only contend.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts what runs in its background with SIGINT ignored, which every process of a test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

# No deadline: how long an example takes depends on who else uses the machine.
hypothesis.settings.register_profile("gpunet", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("gpunet")

#: Tests that may be skipped even under `--no-skips`: start of the id, and why not here. Where what they
#: need is installed, they must run.
MAY_SKIP: dict[str, str] = {}

if importlib.util.find_spec("cupy") is None:
    for _start in (
        "tests/test_nvrtc.py::",
        "tests/test_cuda_backend.py::test_cupy_takes_these_arguments",
        "tests/test_cuda_backend.py::test_constants_of_cupy",
        "tests/test_cuda_backend.py::test_errors_of_cupy",
        "tests/test_cuda_backend.py::test_without_a_gpu_the_real_bindings_say_so",
        "tests/test_custom.py::test_the_example_compiles_for_gpus",
        "tests/test_docs.py::test_examples_run[cuda-",
        "tests/test_distributed_nccl.py::",
        "tests/test_nccl_group.py::test_names_and_arguments_are_those_of_cupy",
        "tests/test_fusion.py::test_sources_compile_for_gpus",
    ):
        MAY_SKIP[_start] = "CuPy and NVRTC come with the extra cuda12 or cuda13"
if importlib.util.find_spec("cudnn") is None:
    MAY_SKIP["tests/test_cudnn.py::"] = "cuDNN comes with the extra cuda12 or cuda13"
if importlib.util.find_spec("nvmath") is None:
    MAY_SKIP["tests/test_gemm.py::"] = "cuBLASLt comes with the extra cuda12 or cuda13"
if importlib.util.find_spec("mpi4py") is None:
    for _name in ("distributed_", "data_parallel_ranks"):
        MAY_SKIP[f"tests/test_{_name}"] = "MPI comes with the extra mpi"
if importlib.util.find_spec("ziglang") is None and not any(map(shutil.which, ("g++", "clang++"))):
    MAY_SKIP["tests/"] = "the simulated device, which tests of every part use, needs a C++ compiler"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if any test outside MAY_SKIP is skipped")
    parser.addoption(
        "--skipped-to",
        type=Path,
        metavar="FILE",
        help="write the ids of the skipped tests, one a line: `pytest @FILE` runs them",
    )


def _skipped(config: pytest.Config) -> list[str]:
    """Ids of the tests and modules that were skipped; empty on a worker of pytest-xdist."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [report.nodeid for report in reporter.stats.get("skipped", [])] if reporter else []


def _forbidden_skips(config: pytest.Config) -> list[str]:
    """Ids of the tests and modules skipped against the rule; empty without `--no-skips`."""
    if not config.getoption("--no-skips"):
        return []
    return [nodeid for nodeid in _skipped(config) if not nodeid.startswith(tuple(MAY_SKIP))]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--skipped-to")
    if target is not None and not hasattr(session.config, "workerinput"):
        target.write_text("".join(f"{nodeid}\n" for nodeid in sorted(set(_skipped(session.config)))))
    if session.exitstatus == pytest.ExitCode.OK and _forbidden_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    forbidden = _forbidden_skips(terminalreporter.config)
    if forbidden:
        terminalreporter.section("skipped, and --no-skips was given", red=True, bold=True)
        for nodeid in forbidden:
            terminalreporter.line(nodeid)


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test registers (operators, kernels, sources) is forgotten behind it."""
    for module, name in (
        ("gpunet.schema", "_schemas"),
        ("gpunet.kernels", "_kernels"),
        ("gpunet.cuda_kernels.signature", "declared"),
        ("gpunet.cuda_kernels.sources", "_registered"),
        ("gpunet.custom", "_modules"),
    ):
        owner = importlib.import_module(module)
        monkeypatch.setattr(owner, name, dict(getattr(owner, name)))

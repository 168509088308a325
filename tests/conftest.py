"""What holds for every test: one BLAS thread a worker, the same examples in every run, and `--no-skips`."""

import os

# Before anything imports numpy. Workers of pytest-xdist share the cores, so more threads only contend.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest

# No deadline: how long an example takes depends on who else uses the machine.
hypothesis.settings.register_profile("gpunet", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("gpunet")

# Tests that may be skipped even under `--no-skips`: start of the id, and why it cannot run everywhere.
MAY_SKIP: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if any test outside MAY_SKIP is skipped")


def _forbidden_skips(config: pytest.Config) -> list[str]:
    """Ids of the tests and modules skipped against the rule; empty without `--no-skips`."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("--no-skips"):
        return []
    skipped = [report.nodeid for report in reporter.stats.get("skipped", [])]
    return [nodeid for nodeid in skipped if not nodeid.startswith(tuple(MAY_SKIP))]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _forbidden_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    forbidden = _forbidden_skips(terminalreporter.config)
    if forbidden:
        terminalreporter.section("skipped, and --no-skips was given", red=True, bold=True)
        for nodeid in forbidden:
            terminalreporter.line(nodeid)

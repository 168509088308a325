"""Threads of BLAS: one while nets run, and results that do not depend on their number."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest

import gpunet
from gpunet.blas import Library, OneThread, openblas
from gpunet.cores import BUSY_LANES
from gpunet.cpu_fallback import lanes as cpu_lanes
from gpunet.cpu_fallback.products import product
from gpunet.cpu_fallback.threads import thread_count
from gpunet.crew import CREW
from gpunet.observers import observe
from tests.sim_kernels import needs_compiler


class FakeLibrary(Library):
    """Four threads, and a list of what was set."""

    def __init__(self, threads: int = 4) -> None:
        self.threads = threads
        self.calls: list[int] = []
        super().__init__(lambda: self.threads, self._change)

    def _change(self, number: int) -> None:
        self.threads = number
        self.calls.append(number)


def numpys_openblas() -> Library:
    """The library; fails where NumPy says that it has OpenBLAS and none is found."""
    library = openblas()
    name = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    if "openblas" in name:
        assert library is not None, f"NumPy has {name}, but it was not found among the loaded libraries"
    return library or FakeLibrary()


@pytest.fixture
def two_threads():
    """NumPy's BLAS at two threads, however the environment has set it."""
    library = numpys_openblas()
    before = library.get()
    library.set(2)
    yield library
    library.set(before)


def test_one_thread_inside_and_what_there_was_before_outside() -> None:
    library = FakeLibrary()
    one = OneThread(lambda: library)
    with one:
        assert library.threads == 1
        with one:
            assert library.threads == 1
        assert library.threads == 1
    assert library.threads == 4
    assert library.calls == [1, 4]


def test_contexts_of_several_threads_end_with_the_last_one() -> None:
    library = FakeLibrary()
    one = OneThread(lambda: library)
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with one:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    with one:
        pass
    assert library.threads == 1
    leave.set()
    thread.join()
    assert library.threads == 4


def test_threads_are_given_back_after_an_error() -> None:
    library = FakeLibrary()
    with pytest.raises(ZeroDivisionError), OneThread(lambda: library):
        raise ZeroDivisionError
    assert library.threads == 4


def test_one_thread_is_left_as_it_is() -> None:
    library = FakeLibrary(1)
    with OneThread(lambda: library):
        pass
    assert library.calls == []


def test_another_blas_is_left_alone() -> None:
    with OneThread(lambda: None):
        assert np.ones((2, 2)).sum() == 4


@pytest.mark.parametrize("engine", ["simple", "async_scheduling"])
def test_nets_run_with_one_thread_and_give_back_the_others(engine: str, two_threads: Library) -> None:
    model = branches()
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    name = workspace.create(start(model, workspace), engine=engine, workers=2)
    seen: list[int] = []
    with observe(workspace, name, before=lambda call: seen.append(two_threads.get())):
        workspace.run(name)
    assert len(seen) > 4
    assert set(seen) == {1}
    assert two_threads.get() == 2


# Depths that OpenBLAS cuts in another way with two threads than with one, and rows that are a single one.
SHAPES = [(64, 500, 800), (500, 400, 130), (1, 20_000, 1024), (1200, 500, 37), (200, 4000, 33)]


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_products_are_the_same_bits_whatever_is_busy(
    rows: int, depth: int, columns: int, two_threads: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, depth), dtype=np.float32)
    b = rng.standard_normal((columns, depth), dtype=np.float32).T
    assert a.shape[0] * b.size >= cpu_lanes.THREAD_WORK
    shared, alone = np.empty((2, rows, columns), np.float32)
    used = []
    inner = CREW.run
    monkeypatch.setattr(CREW, "run", lambda pieces, *rest: (used.append(len(pieces)), inner(pieces, *rest)))
    with OneThread(lambda: two_threads):
        product(a, b, shared)
        with ExitStack() as busy:
            for _ in range(thread_count()):
                busy.enter_context(BUSY_LANES.working())
            product(a, b, alone)
    assert used == [cpu_lanes.LANES] * 2
    np.testing.assert_array_equal(shared, alone)
    np.testing.assert_allclose(shared, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5, 300, 200), (5, 200, 100)),
        ((300, 200), (5, 200, 100)),
        ((1, 300, 200), (5, 200, 100)),
        ((3, 1, 120, 300), (3, 2, 300, 140)),
        ((3, 1, 120, 300), (2, 300, 140)),
        ((1, 900, 300), (1, 300, 140)),
        ((1, 90, 300), (1, 300, 1400)),
    ],
)
def test_stacks_of_matrices_are_cut_too(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(a), rng.standard_normal(b)
    wanted = np.matmul(x, y)
    assert wanted.size * a[-1] >= cpu_lanes.THREAD_WORK
    found = np.empty_like(wanted)
    product(x, y, found)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def branches() -> gpunet.Model:
    """Two branches of products whose bits depend on the threads of BLAS, and their gradients."""
    model = gpunet.Model("branches")
    x, label = model.input("x", (64, 500)), model.input("label", (64,), "int32")
    joined = model.sum([model.relu(model.fc(x, f"fc{i}", 1000)) for i in range(2)], "joined")
    model.softmax_with_loss(model.fc(joined, "out", 10), label, "loss")
    model.add_gradients("loss")
    return model


def start(model: gpunet.Model, workspace: gpunet.Workspace) -> gpunet.Net:
    """The model's net, fed."""
    rng = np.random.default_rng(1)
    workspace.feed("x", rng.standard_normal((64, 500), dtype=np.float32))
    workspace.feed("label", rng.integers(0, 10, 64).astype(np.int32))
    return model.net


def test_threads_of_blas_and_lanes_do_not_show_in_bits(two_threads: Library) -> None:
    model = branches()
    results = []
    for engine, workers, threads in (("simple", 1, 2), ("simple", 1, 1), ("async_scheduling", 2, 2)):
        two_threads.set(threads)
        workspace = gpunet.Workspace("cpu", seed=3)
        workspace.run_once(model.init_net)
        name = workspace.create(start(model, workspace), engine=engine, workers=workers)
        workspace.run(name)
        results.append({blob: workspace.fetch(blob) for blob in workspace.blobs()})
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for blob, value in other.items():
            np.testing.assert_array_equal(value, results[0][blob], err_msg=blob)


@needs_compiler
def test_threads_of_blas_do_not_show_in_bits_of_the_simulated_device(two_threads: Library) -> None:
    """Its products are BLAS' where there is no GPU, and run when something waits for them: behind the run."""
    model = branches()
    results = []
    for threads in (2, 1):
        two_threads.set(threads)
        workspace = gpunet.Workspace("sim:0", seed=3)
        workspace.run_once(model.init_net)
        name = workspace.create(start(model, workspace), engine="async_scheduling", workers=2)
        workspace.run(name)
        results.append({blob: workspace.fetch(blob) for blob in workspace.blobs()})
    assert two_threads.get() == 1
    for blob, value in results[1].items():
        np.testing.assert_array_equal(results[0][blob], value, err_msg=blob)

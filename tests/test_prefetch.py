"""Batches that threads prepare ahead: the sampler's order and position, errors, and the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet import backends
from gpunet.cuda_kernels.cuda_backend import CudaBackend
from gpunet.cuda_kernels.sim import toolchain
from gpunet.data import Batches, DatasetError, Prefetcher, ShiftFlip, load_dataset
from gpunet.devices import Device
from gpunet.training import CheckpointFolder, Ranks, Settings, make_trainer
from tests.test_cuda_backend import fake

SAMPLES = 23
IMAGES = np.arange(SAMPLES * 4, dtype=np.float32).reshape(SAMPLES, 1, 2, 2)
LABELS = np.arange(SAMPLES, dtype=np.int32)


def sampler(augment: Any = None, **options: Any) -> Batches:
    return Batches(IMAGES, LABELS, 5, seed=3, augment=augment, **{"wrap": True, **options})


def slow_at_first(images: np.ndarray, indices: np.ndarray, epoch: int) -> np.ndarray:
    """Takes long for some batches, so that later ones are ready first."""
    time.sleep(0.002 * float(indices[0] % 5))
    return images + epoch


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    deadline = time.monotonic() + 60
    while left := [t.name for t in threading.enumerate() if t.name.startswith("gpunet prefetch")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"shard": (1, 3)}, {"wrap": False}, {"wrap": False, "drop_last": True}], ids=str
)
def test_order_and_position_are_those_of_the_sampler(threads: int, options: dict[str, Any]) -> None:
    expected, found = sampler(slow_at_first, **options), sampler(slow_at_first, **options)
    ahead = Prefetcher(found, threads)
    for _ in range(17):
        for mine, wanted in zip(ahead.next_batch(), expected.next_batch(), strict=True):
            np.testing.assert_array_equal(mine, wanted)
        assert found.state() == expected.state()
        assert found.last_size == expected.last_size
    ahead.close()


def test_what_is_ahead_is_neither_lost_nor_counted() -> None:
    expected, found = sampler(), sampler()
    ahead = Prefetcher(found, 2, depth=4)
    labels = [ahead.next_batch()[1].tolist() for _ in range(3)]
    saved = found.state()
    ahead.close()
    # The same object goes on, and another one from what was saved.
    labels += [ahead.next_batch()[1].tolist() for _ in range(6)]
    ahead.close()
    again = sampler()
    again.restore(saved)
    resumed = Prefetcher(again, 3)
    labels[3:] = [resumed.next_batch()[1].tolist() for _ in range(6)]
    resumed.close()
    assert labels == [expected.next_batch()[1].tolist() for _ in range(9)]


def test_no_more_are_prepared_than_were_asked_for() -> None:
    made: list[int] = []

    def count(images: np.ndarray, indices: np.ndarray, epoch: int) -> np.ndarray:
        made.append(len(indices))
        return images

    found = sampler(count, wrap=False)
    ahead = Prefetcher(found, 2, depth=3)
    for given in range(1, 5):
        ahead.next_batch()
        deadline = time.monotonic() + 60
        while len(made) < given + 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.02)
        assert len(made) == given + 3
    ahead.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_comes_in_its_turn_with_the_number_of_the_batch(threads: int) -> None:
    broken = int(sampler().order(1)[9])

    def refuse(images: np.ndarray, indices: np.ndarray, epoch: int) -> np.ndarray:
        if epoch == 1 and broken in indices:
            raise OSError("image 9 is cut off")
        return images

    found = sampler(refuse, wrap=False)
    ahead = Prefetcher(found, threads)
    for _ in range(6):
        ahead.next_batch()
    place = found.state()
    for _ in range(2):
        with pytest.raises(
            DatasetError, match="batch 2 of epoch 2 could not be prepared: OSError: image 9 is cut off"
        ) as caught:
            ahead.next_batch()
        assert isinstance(caught.value.__cause__, OSError)
        assert found.state() == place


def test_threads_end_when_nobody_holds_the_object() -> None:
    ahead = Prefetcher(sampler(), 2)
    ahead.next_batch()
    del ahead  # the fixture waits for its threads


def test_more_threads_than_the_system_starts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, threading.active_count()

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() >= before + 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(DatasetError, match=r"3 of 99 threads could be started \(can't start new thread\)"):
        Prefetcher(sampler(), 99).next_batch()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_numbers_that_make_no_sense() -> None:
    for threads, depth in ((-1, None), (1, 0)):
        with pytest.raises(DatasetError, match="wanted 0 threads or more"):
            Prefetcher(sampler(), threads, depth=depth)


def test_batches_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake bindings of CUDA: one copy an array, from memory that stays as it is until the copy is done."""
    cuda = fake(memory=64 << 20)
    device = CudaBackend(Device("cuda"), cuda)
    monkeypatch.setitem(backends._open, device.device, device)
    freed: list[int] = []
    monkeypatch.setattr(cuda.runtime, "freeHost", freed.append)
    workspace = gpunet.Workspace("cpu")
    expected, found = sampler(), sampler()
    ahead = Prefetcher(found, 2, depth=2, device=device)
    cuda.runtime.copies.clear()
    for step in range(8):
        images, labels = ahead.next_batch()
        assert images.ctypes.data in cuda.runtime.blocks
        ahead.feed(workspace, "data", images)
        ahead.feed(workspace, "label", labels)
        assert len(cuda.runtime.copies) == 2 * (step + 1)
        buffer = workspace.storage("data", device.device)
        wanted = expected.next_batch()
        copied = np.empty(buffer.shape, np.float32)
        device.copy_out(copied, buffer, device.stream)
        cuda.runtime.copies.pop()
        np.testing.assert_array_equal(copied, wanted[0])
    assert not freed
    ahead.close()
    del images, labels, ahead
    # Three batches of two arrays each had room.
    assert len(freed) == 6


def losses(device: str, prefetch: int, parts: int = 1) -> list[float]:
    dataset = load_dataset("digits")
    settings = Settings.of("mlp", 1, epochs=1, batch_size=90, max_shift=1)
    ranks = Ranks(micro_batches=parts) if parts > 1 else None
    trainer = make_trainer(settings, dataset, device=device, prefetch=prefetch, ranks=ranks)
    return [step.loss for step in trainer.run().steps]


def test_training_is_the_same_to_the_bit() -> None:
    plain = losses("cpu", 0)
    assert losses("cpu", 3) == plain
    np.testing.assert_allclose(losses("cpu", 2, parts=4), plain, atol=1e-5)


def test_training_on_the_simulated_device_is_the_same_to_the_bit() -> None:
    if toolchain.find() is None:
        pytest.skip(toolchain.MISSING)
    assert losses("sim:0", 2) == losses("sim:0", 0)
    assert backends.backend(Device("sim", 0)).pinned(3).nbytes == 3


class InterruptedRunError(Exception):
    pass


class EndsAt:
    """Ends a run in the middle."""

    def __init__(self, step: int) -> None:
        self.at = step

    def step(self, step: Any, total: int, samples: int) -> None:
        if step.step == self.at:
            raise InterruptedRunError

    def epoch(self, epoch: Any, total: int) -> None:
        pass


def test_a_run_that_ended_goes_on_to_the_same_bits(tmp_path: Any) -> None:
    dataset = load_dataset("digits")
    settings = Settings.of("mlp", 1, epochs=2, batch_size=200, max_shift=1)

    def trainer(folder: str, prefetch: int) -> Any:
        found = CheckpointFolder(tmp_path / folder)
        return make_trainer(
            settings, dataset, device="cpu", checkpoints=found, checkpoint_every=3, prefetch=prefetch
        )

    whole = trainer("whole", 0)
    expected = whole.run()
    first = trainer("cut", 2)
    with pytest.raises(InterruptedRunError):
        first.run(reporter=EndsAt(8))
    second = trainer("cut", 3)
    checkpoint = CheckpointFolder(tmp_path / "cut").latest()
    assert checkpoint is not None
    assert checkpoint.state.step == 6
    second.restore(checkpoint)
    assert [s.loss for s in second.run().steps] == [s.loss for s in expected.steps]
    for name in whole.model.training_blobs():
        np.testing.assert_array_equal(second.workspace.fetch(name), whole.workspace.fetch(name))


def test_augmentation_of_several_threads_is_that_of_one() -> None:
    augment = ShiftFlip(seed=2, max_shift=1, flip=True)
    one, many = sampler(augment), Prefetcher(sampler(augment), 4)
    for _ in range(12):
        np.testing.assert_array_equal(many.next_batch()[0], one.next_batch()[0])
    many.close()

"""Several ranks train like one process on the whole batch: the same losses, the same bits on all of them."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpunet.training import CheckpointFolder
from tests import mpi_jobs
from tests.distributed_workers import training

pytestmark = pytest.mark.slow


@functools.cache
def alone(name: str) -> Any:
    """What one process measures on the whole batch."""
    return training.measure(name, alone=True)


def measured(ranks: int, *names: str) -> dict[str, Any]:
    output = mpi_jobs.succeed(ranks, "training", *names)
    line = next(line for line in output.splitlines() if line.startswith("measured "))
    found: dict[str, Any] = json.loads(line.removeprefix("measured "))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_measure_what_one_process_does(ranks: int) -> None:
    # `few` has batches of 3: one of 4 ranks has no samples.
    found = measured(ranks, "mlp", "lenet", "few", "parts", "table")
    np.testing.assert_allclose(found.pop("table"), alone("table"))
    for name, course in found.items():
        assert len(course["losses"]) == training.STEPS
        np.testing.assert_allclose(course["losses"], alone(name)["losses"], atol=1e-5, err_msg=name)
        np.testing.assert_allclose(course["accuracies"], alone(name)["accuracies"], atol=1e-6, err_msg=name)
        np.testing.assert_allclose(course["scores"], alone(name)["scores"], rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_batch_norm_and_shared_state_are_those_of_one_process(ranks: int) -> None:
    shared = [f"sharded={name}" for name in training.SHARED]
    found = measured(ranks, "smooth", *shared)
    np.testing.assert_allclose(found["smooth"], alone("smooth"), atol=1e-5)
    for name in shared:
        assert len(found[name]) == training.STEPS
        np.testing.assert_allclose(found[name], alone(name), atol=1e-5, err_msg=name)


def test_shared_state_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Four ranks, then three, then one that shares nothing, then two."""
    for name in ("adam", "lars"):
        folder = tmp_path / name
        measured(4, f"shared={name}={folder}=6")
        assert len(list(folder.glob("step-00000006.rank-*-of-4.*.part"))) == 4
        measured(3, f"shared={name}={folder}=10")
        training.sharded(name, str(folder), alone=True, ends=15)
        assert not list(folder.glob("step-00000015.*.part"))
        found = measured(2, f"shared={name}={folder}=20")[f"shared={name}={folder}=20"]
        np.testing.assert_allclose(found, alone(f"sharded={name}"), atol=1e-5)
        # Those of steps that are kept no more are gone.
        assert {p.name.split(".")[0] for p in folder.iterdir()} == {"step-00000015", "step-00000020"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_compression_keeps_goes_on_to_the_same_bits(ranks: int, tmp_path: Path) -> None:
    names = ["float16+feedback", "powersgd:2", "topk:0.05:0.5"]
    jobs = [f"kept={name}={tmp_path / str(i)}" for i, name in enumerate(names)]
    for job, found in measured(ranks, *jobs).items():
        assert found["own"] > 0
        assert found["resumed"] == found["whole"], job
        # What ranks keep differs between them, and parameters do not.
        first, second = found["whole"]["digests"][:2]
        assert first["fc1_w"] == second["fc1_w"]
        assert first != second


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_residual_network_trains_alike(ranks: int) -> None:
    found = measured(ranks, "resnet")["resnet"]["losses"]
    np.testing.assert_allclose(found, alone("resnet")["losses"], atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_steps_of_the_residual_network_at_its_usual_rate(ranks: int) -> None:
    """Each step begins where one process is, so that nothing can grow from step to step. Gradients differ by
    rounding errors alone, but for steps in which an input of ReLU is 0 but for these.
    """
    found, expected = measured(ranks, "usual_rate")["usual_rate"], alone("usual_rate")["losses"]
    assert len(expected) == training.STEPS
    assert max(expected) - min(expected) > 0.5, "it learns"
    np.testing.assert_allclose(found["losses"], expected, atol=1e-5)
    assert np.median(found["gradients"]) < 1e-5
    # Updates differ by the rounding of parameters, which are larger than they are.
    assert np.median(found["updates"]) < 1e-4
    assert max(found["gradients"] + found["updates"]) < 1e-2


def test_the_residual_network_needs_synchronised_batch_norm() -> None:
    found = measured(2, "unsynced")
    expected = alone("resnet")["losses"]
    assert np.abs(np.subtract(found["unsynced"]["losses"], expected)).max() > 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_compressed_gradients_train_alike(ranks: int) -> None:
    # Above what rounding, or the rank of PowerSGD, does, and below what half a gradient would do: 0.1 with
    # the perceptron, more with LeNet.
    tolerances = {"float16": 1e-3, "feedback": 1e-3, "powersgd": 0.05, "half": 1e-2}
    found = measured(ranks, *tolerances)
    for name, tolerance in tolerances.items():
        np.testing.assert_allclose(found[name]["losses"], alone(name)["losses"], atol=tolerance, err_msg=name)


def test_bfloat16_trains_alike_on_two_ranks() -> None:
    tolerances = {"bfloat16": 8e-2, "bfloat16_feedback": 1e-3, "bfloat16_half": 2e-2}
    found = measured(2, *tolerances)
    for name, tolerance in tolerances.items():
        np.testing.assert_allclose(found[name]["losses"], alone(name)["losses"], atol=tolerance, err_msg=name)


@pytest.mark.parametrize("compression", ["float16+feedback", "powersgd", "topk:0.05:0"])
def test_a_run_tells_what_was_sent_and_what_was_not(compression: str, tmp_path: Path) -> None:
    options = ("--epochs", "1", "--device", "cpu", "--compression", compression, "--out", str(tmp_path))
    done = mpi_jobs.Running(mpi_jobs.mpirun(2, "gpunet", "train", "mlp", *options)).end()
    assert done.status == 0, done.output
    name = re.escape("powersgd:1" if compression == "powersgd" else compression)
    sent = rf"on each of 2 ranks; [1-9][\d.]* KiB of gradients a step in \d+ buckets, compression {name} \("
    assert re.search(sent, done.output)
    kept = rf"compression {name} kept back ([\d.e-]+)% of the norm of this rank's gradients in the last step"
    found = re.search(kept, done.output)
    assert found is not None, done.output
    assert 0 < float(found[1]) < (0.1 if compression == "float16+feedback" else 10_000)


def losses(folder: Path) -> np.ndarray:
    return np.loadtxt(folder / "steps.csv", delimiter=",", skiprows=1, usecols=2)


SETTINGS = ("train", "mlp", "--epochs", "6", "--device", "cpu")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("one")
    alone = [sys.executable, "-m", "gpunet", *SETTINGS, "--out", str(folder)]
    done = mpi_jobs.Running(alone).end()
    assert done.status == 0, done.output
    return losses(folder)


def paused(folder: Path, ranks: int, place: str, *settings: str) -> list[str]:
    """The command of a run of which one rank waits for what the test does to it: `RANK PLACE STEP`."""
    worker = "tests.distributed_workers.paused"
    return mpi_jobs.mpirun(ranks, worker, *place.split(), *SETTINGS, *settings, "--out", str(folder))


def go_on(folder: Path, ranks: int) -> None:
    words = ("train", "mlp", "--resume", "--out", str(folder), "--device", "cpu")
    done = mpi_jobs.Running(mpi_jobs.mpirun(ranks, "gpunet", *words)).end()
    assert done.status == 0, done.output
    assert f"on each of {ranks} ranks" in done.output
    assert "going on after step" in done.output


@pytest.mark.parametrize("place", ["2 step 16", "0 save 20", "0 write 20"])
def test_a_killed_rank_ends_the_run_and_three_go_on(
    place: str, tmp_path: Path, one_process: np.ndarray
) -> None:
    """Also one that is killed when parts of a checkpoint are written, or a part of its file."""
    rank = place[0]
    job = mpi_jobs.Running(paused(tmp_path, 4, place, "--checkpoint-every", "5", "--shard-optimizer"))
    waits = job.wait_for(rf"rank {rank} waits, pid (\d+)")
    killed = time.monotonic()
    os.kill(int(waits[1]), signal.SIGKILL)
    done = job.end()
    assert done.ended - killed < 30
    assert done.status != 0
    # The monitor knows the step, however soon the launcher kills those that would have told where they wait.
    ended = (
        rf"gpunet: rank {rank} of 4 on host \S+ \(pid \d+\) has ended without a word [^\n]*\bin [^\n]+, "
        r"step \d+\n"
    )
    assert re.search(ended, done.output), done.output
    latest = CheckpointFolder(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert latest.state.step == 15
    go_on(tmp_path, 3)
    np.testing.assert_allclose(losses(tmp_path), one_process, atol=1e-4)
    # What was left half done is gone.
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert [name.endswith(".checkpoint") for name in names] == [True, True], names


def saved_by_a_signal(job: mpi_jobs.Job, folder: Path) -> None:
    """A job of three ranks ended by a signal, and two go on."""
    # One rank speaks for all.
    assert job.output.count("interrupted after step") == 1, job.output
    assert "interrupted after step 16 of" in job.output
    (checkpoint,) = (folder / "checkpoints").glob("*.checkpoint")
    assert checkpoint.name == "step-00000016.checkpoint"
    go_on(folder, 2)
    assert (folder / "predict_net.pb").is_file()


def test_a_signal_saves_and_another_number_of_ranks_goes_on(tmp_path: Path, one_process: np.ndarray) -> None:
    job = mpi_jobs.Running(paused(tmp_path, 3, "1 step 16", "--checkpoint-every", "1000"))
    waits = job.wait_for(r"rank 1 waits, pid (\d+)")
    # Open MPI's mpirun would show nothing more, and kill the ranks soon.
    os.kill(int(waits[1]) if mpi_jobs.open_mpi() else job.process.pid, signal.SIGTERM)
    done = job.end()
    assert done.status != 0
    saved_by_a_signal(done, tmp_path)
    np.testing.assert_allclose(losses(tmp_path), one_process, atol=1e-4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_gpunet_launch_gives_time_to_save(number: signal.Signals, tmp_path: Path) -> None:
    _, *options = paused(tmp_path, 3, "1 step 16", "--checkpoint-every", "1000")
    words = options[options.index("-m") - 1 :]
    job = mpi_jobs.Running([sys.executable, "-m", "gpunet", "launch", "-n", "3", "--", *words])
    job.wait_for(r"rank 1 waits, pid (\d+)")
    job.process.send_signal(number)
    done = job.end()
    if mpi_jobs.open_mpi():
        assert done.status == 128 + number
    assert done.status != 0
    saved_by_a_signal(done, tmp_path)

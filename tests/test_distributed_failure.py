"""A rank that fails ends its job soon, with a message that says which, where and in what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpi_jobs import Job, check_nothing_is_left, run_ranks

STEP = r"\[Allreduce\] op \d 'y' in net 'train' \(all_reduce \(sum\) of float32 10\), step \d+"
#: Seconds: enough for ranks to start at different times on a busy machine.
TIMEOUT = "15"


def fail(ranks: int, *arguments: str, **env: str) -> Job:
    """A job that ends badly in time, of which nothing is left running, and no memory."""
    job = run_ranks(ranks, "failures", *arguments, **env)
    assert job.status != 0, job.output
    assert len(set(job.pids())) >= ranks
    if failed := re.search(r"fails at ([\d.]+)", job.output):
        assert job.ended - float(failed[1]) < 30
    check_nothing_is_left(job.pids())
    for path in map(Path, re.findall(r"shares (\S+)", job.output)):
        if env.get("GPUNET_MONITOR") == "0":
            # Nobody is there to do it.
            path.unlink(missing_ok=True)
        assert not path.exists()
    return job


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank(rank: int) -> None:
    job = fail(4, "kill", str(rank))
    who = rf"rank {rank} of 4 on host \S+ \(pid \d+\)"
    assert re.search(
        rf"gpunet: {who} has ended without a word \(killed, or crashed\), last in {STEP}", job.output
    )


def test_a_rank_that_raises() -> None:
    output = fail(3, "raise", "1").output
    assert "ValueError: a bad sample" in output
    assert re.search(
        rf"rank 1 of 3 on host \S+ \(pid \d+\) failed with ValueError: a bad sample; last in {STEP}", output
    )


def test_a_rank_whose_operator_fails() -> None:
    output = fail(2, "operator", "1").output
    assert re.search(
        r"rank 1 of 2 on host \S+ \(pid \d+\) failed with DataTypeError: \[Scale\] op 0 'y'", output
    )


@pytest.mark.parametrize("mode", ["hang", "stop"])
def test_a_rank_that_does_not_come(mode: str) -> None:
    output = fail(3, mode, "1", GPUNET_COLLECTIVE_TIMEOUT=TIMEOUT).output
    who = r"rank 1 of 3 on host \S+ \(pid \d+\)"
    assert re.search(rf"has waited \d+ seconds for {who}, last in {STEP}", output), output
    assert re.search(rf"rank [02] of 3 on host \S+ \(pid \d+\) [^\n]*, in {STEP}", output)
    where = r", now in steps, failures\.py:\d+" if mode == "hang" else r", not heard of for \d+ seconds"
    assert re.search(rf"{who}, last in {STEP}{where}", output), output


def test_an_operator_that_hangs() -> None:
    """Its name is in the message, and the line of code, though it has nothing to do with other ranks."""
    output = fail(3, "sleepy", "1", GPUNET_COLLECTIVE_TIMEOUT=TIMEOUT).output
    who = r"rank 1 of 3 on host \S+ \(pid \d+\)"
    where = r"now in \[Sleepy\] op 1 'z' in net 'train' \(sleepy, failures\.py:\d+\)"
    assert re.search(rf"has waited \d+ seconds for {who}, last in {STEP}, {where}", output), output


def test_a_rank_that_does_not_start() -> None:
    """The others wait inside of MPI, where nothing of Python runs."""
    job = run_ranks(3, "failures", "absent", "1", GPUNET_COLLECTIVE_TIMEOUT=TIMEOUT)
    assert job.status != 0, job.output
    check_nothing_is_left(job.pids())
    who = r"gpunet: rank [02] of 3 on host \S+ \(pid \d+\)"
    assert re.search(rf"{who} has waited [\d.]+ seconds for the other ranks to start", job.output), job.output


def test_a_rank_that_stops_when_the_others_end() -> None:
    """They wait in MPI's own end, which knows of no limit."""
    output = fail(3, "end", "1", GPUNET_COLLECTIVE_TIMEOUT=TIMEOUT).output
    who = r"gpunet: rank 1 of 3 on host \S+ \(pid \d+\), "
    silent = r"has not been heard of for \d+ seconds, and rank [02] waits for it at the end of the job"
    assert re.search(rf"{who}[^\n]*{silent}", output), output


def test_without_the_monitor_waiting_ends_too() -> None:
    output = fail(2, "hang", "1", GPUNET_COLLECTIVE_TIMEOUT=TIMEOUT, GPUNET_MONITOR="0").output
    assert re.search(
        rf"rank 0 of 2 .* has waited [\d.]+ seconds for the other ranks, in {STEP}: not all", output
    )


def test_a_rank_that_leaves_early() -> None:
    output = fail(3, "exit", "1").output
    assert re.search(
        r"rank 1 of 3 on host \S+ \(pid \d+\) has left the job, last in .*, but rank [02] waits for it",
        output,
    )


def test_errors_instead_of_an_abort() -> None:
    """The error can be caught, to save what there is; MPI's own mpirun may be faster, and end all ranks."""
    output = fail(3, "caught", "1", GPUNET_ABORT="0").output
    assert re.search(r"rank 1 of 3 on host \S+ \(pid \d+\) has ended without a word", output)


REDUCE = "rank 0 is in all_reduce (sum) of float32 4"
NET = "of net 'train' is not the same on all ranks: rank 0 has"
MESSAGES = {
    "type": f"{REDUCE}; rank 1 is in all_reduce (sum) of int32 4",
    "shape": f"{REDUCE}; rank 1 is in all_reduce (sum) of float32 5",
    "empty": f"{REDUCE}; rank 1 is in all_reduce (sum) of float32 0",
    "op": f"{REDUCE}; rank 1 is in all_reduce (max) of float32 4",
    "root": "rank 0 is in broadcast of float32 4 from 0; rank 1 is in broadcast of float32 4 from 1",
    "kind": f"{REDUCE}; rank 1 is in barrier",
    "graph": f'operator 0 {NET} [Scale] x -> y (name: "scale" f: 2); '
    'rank 1 has [Scale] x -> y (name: "scale" f: 3)',
    "longer": f"operator 2 {NET} only 2 operators; rank 1 has [Relu] y -> y",
    "setting": "setting 'batch-size' is not the same on all ranks: rank 0 has 64; rank 1 has 32; wanted",
    "missing": "setting 'seed' is not the same on all ranks: rank 0 has 0; rank 1 has none; wanted",
    "specs": f"blob 'w' {NET} 'w' float32 3x4; rank 1 has 'w' float16 3x4",
}


def test_ranks_that_disagree() -> None:
    """All ranks learn of it, with names, and could go on together."""
    job = run_ranks(2, "failures", "disagree")
    assert job.status == 0, job.output
    for name, message in MESSAGES.items():
        for rank in range(2):
            (line,) = re.findall(rf"^{name}, rank {rank}: (.*)$", job.output, re.MULTILINE)
            assert message in line
    assert "none, rank" not in job.output


@pytest.mark.parametrize("mode", ["shape", "receive"])
def test_a_disagreement_that_nobody_catches(mode: str) -> None:
    message = "rank 0 sends 4 elements of float32 with tag 0, rank 1 wants 3 of float32"
    assert (MESSAGES[mode] if mode == "shape" else message) in fail(2, mode).output

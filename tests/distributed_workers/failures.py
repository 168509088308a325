"""Ranks that fail: `failures MODE [RANK]`. Each says its process id: a test looks for what is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

import gpunet
from gpunet import custom, distributed
from gpunet.definitions import make_operator as op
from gpunet.distributed import check_same_graph, mpi
from gpunet.distributed.agreement import check_same_settings
from gpunet.distributed.start import shared_memory
from gpunet.proto import NetDef
from gpunet.specs import TensorSpec

STEPS = 200
Part = Callable[[distributed.Communicator, bool], None]


def say(text: str) -> None:
    """Writes a line at once: lines of ranks must not be mixed."""
    os.write(1, f"{text}\n".encode())


def sleepy(x: np.ndarray) -> np.ndarray:
    """Takes long where it gets a 0."""
    if not x.all():
        time.sleep(1000)
    return x


custom.operator("Sleepy", numpy=sleepy)


def net(scale: float = 2.0) -> NetDef:
    ops = [op("Scale", ["x"], ["y"], scale=scale), op("Allreduce", ["y"], ["y"])]
    return NetDef(name="train", op=ops, external_input=["x"], external_output=["y"])


def steps(world: distributed.Communicator, mode: str, bad: int) -> None:
    """Steps of a net with a collective; the bad rank fails in one of them."""
    ws = gpunet.Workspace()
    ws.feed("x", np.ones(10, np.float32))
    made = net()
    if mode == "sleepy":
        made.op.insert(1, op("Sleepy", ["x"], ["z"]))
        made.external_output.append("z")
    ws.create(made)
    for step in range(STEPS):
        ws.run("train")
        if step == 5 and world.rank == bad:
            time.sleep(0.4)
            say(f"fails at {time.monotonic()}")
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if mode == "hang":
                time.sleep(1000)
            if mode == "raise":
                raise ValueError("a bad sample")
            if mode == "exit":
                sys.exit(0)
            if mode == "operator":
                ws.feed("x", np.array([b"a"], dtype=object))
            if mode == "sleepy":
                ws.feed("x", np.zeros(10, np.float32))


def stop_at_the_end(bad: bool) -> None:
    """The bad rank stops behind its last collective, and the others end."""
    if bad:
        say(f"fails at {time.monotonic()}")
        os.kill(os.getpid(), signal.SIGSTOP)


def reduce_other(other: np.ndarray) -> Part:
    return lambda world, bad: world.all_reduce(other.copy() if bad else np.ones(4, np.float32))


def longer(extra: bool) -> NetDef:
    made = net()
    if extra:
        made.op.append(op("Relu", ["y"], ["y"]))
    return made


def weight(dtype: str) -> dict[str, TensorSpec]:
    return {"w": TensorSpec((3, 4), np.dtype(dtype))}


#: What the ranks do differently, if the flag is that of the bad one.
DISAGREEMENTS: dict[str, Part] = {
    "type": reduce_other(np.ones(4, np.int32)),
    "shape": reduce_other(np.ones(5, np.float32)),
    "empty": reduce_other(np.ones(0, np.float32)),
    "op": lambda world, bad: world.all_reduce(np.ones(4, np.float32), "max" if bad else "sum"),
    "root": lambda world, bad: world.broadcast(np.ones(4, np.float32), int(bad)),
    "kind": lambda world, bad: world.barrier() if bad else world.all_reduce(np.ones(4, np.float32)),
    "graph": lambda world, bad: check_same_graph(world, net(3.0 if bad else 2.0)),
    "longer": lambda world, bad: check_same_graph(world, longer(bad)),
    "specs": lambda world, bad: check_same_graph(world, net(), weight("float16" if bad else "float32")),
    "setting": lambda world, bad: check_same_settings(world, {"seed": 0, "batch-size": 32 if bad else 64}),
    "missing": lambda world, bad: check_same_settings(world, {} if bad else {"seed": 0}),
    "none": lambda world, bad: check_same_graph(world, net(), weight("float32")),
}


def main() -> None:
    mode, bad = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if mode == "absent" and distributed.discover().rank == bad:
        say(f"rank {bad} is pid {os.getpid()}, and fails at {time.monotonic()}")
        time.sleep(1000)
    world = distributed.init("mpi")
    is_bad = world.rank == bad
    say(f"rank {world.rank} is pid {os.getpid()}")
    for process in mpi._monitors:
        say(f"the monitor is pid {process.pid}")
    for path in shared_memory(os.getpid()):
        say(f"it shares {path}")
    world.barrier()
    if mode == "disagree":
        # All ranks get the error of each, so they can go on together.
        for name, part in DISAGREEMENTS.items():
            try:
                part(world, is_bad)
            except distributed.CollectiveError as error:
                say(f"{name}, rank {world.rank}: {error}")
    elif mode == "shape":
        DISAGREEMENTS[mode](world, is_bad)
    elif mode == "receive":
        x = np.ones(4, np.float32)
        world.recv(x[:3], 0) if is_bad else world.send(x, bad)
    elif mode == "end":
        stop_at_the_end(is_bad)
    elif mode == "caught":
        try:
            steps(world, "kill", bad)
        except distributed.PeerFailed as error:
            say(f"rank {world.rank} saves and leaves: {error}")
    else:
        steps(world, mode, bad)


main()

"""Ranks that fail: `failures MODE [RANK]`. Each says its process id, so that a test can look for what is left."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import gpunet
from gpunet import distributed
from gpunet.definitions import make_operator as op
from gpunet.proto import NetDef

STEPS = 200


def net(scale: float = 2.0) -> NetDef:
    ops = [op("Scale", ["x"], ["y"], scale=scale), op("Allreduce", ["y"], ["y"])]
    return NetDef(name="train", op=ops, external_input=["x"], external_output=["y"])


def steps(world: distributed.Communicator, mode: str, bad: int) -> None:
    """Steps of a net with a collective; the bad rank fails in one of them."""
    ws = gpunet.Workspace()
    ws.feed("x", np.ones(10, np.float32))
    ws.create(net())
    for step in range(STEPS):
        ws.run("train")
        if step == 20 and world.rank == bad:
            time.sleep(0.5)
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


def main() -> None:
    mode, bad = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    world = distributed.init("mpi")
    is_bad = world.rank == bad
    print(f"rank {world.rank} is pid {os.getpid()}", flush=True)
    world.barrier()
    x = np.ones(4, np.float32)
    if mode == "graph":
        distributed.check_same_graph(world, net(3.0 if is_bad else 2.0))
    elif mode == "specs":
        spec = gpunet.specs.spec((3, 4), "float16" if is_bad else "float32")
        distributed.check_same_graph(world, net(), {"w": spec})
    elif mode == "longer":
        longer = net()
        if is_bad:
            longer.op.append(op("Relu", ["y"], ["y"]))
        distributed.check_same_graph(world, longer)
    elif mode == "type":
        world.all_reduce(x.astype(np.int32) if is_bad else x)
    elif mode == "shape":
        world.all_reduce(np.ones(5, np.float32) if is_bad else x)
    elif mode == "empty":
        world.all_reduce(x[:0] if is_bad else x)
    elif mode == "op":
        world.all_reduce(x, "max" if is_bad else "sum")
    elif mode == "root":
        world.broadcast(x, int(is_bad))
    elif mode == "kind":
        world.barrier() if is_bad else world.all_reduce(x)
    elif mode == "receive":
        world.recv(x[:3], 0) if is_bad else world.send(x, bad)
    elif mode == "caught":
        try:
            steps(world, "kill", bad)
        except distributed.PeerFailed as error:
            print(f"rank {world.rank} saves and leaves: {error}", flush=True)
    else:
        steps(world, mode, bad)


main()

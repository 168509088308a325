"""Adds the operator Swish, with its gradient, for the CPU, for GPUs and for the simulated device.

`gpunet check-grad examples.custom_operator:Swish` checks it.
"""

import sys

import numpy as np

import gpunet
from gpunet import custom

SOURCE = """
#include "vector.cuh"
GPUNET_UNARY(swish, x / (1 + exp(-x)))
GPUNET_BINARY(swish_gradient, x, dy, dy * (1 + x * (1 - 1 / (1 + exp(-x)))) / (1 + exp(-x)))
"""


def swish(x):
    return x / (1 + np.exp(-x))


def swish_gradient(x, dy):
    return dy * (1 + x * (1 - 1 / (1 + np.exp(-x)))) / (1 + np.exp(-x))


custom.operator("SwishGradient", inputs=["X", "dY"], outputs=["dX"], numpy=swish_gradient, cuda=SOURCE)
custom.operator("Swish", numpy=swish, cuda=SOURCE, gradient="SwishGradient", doc="``Y = X / (1 + exp(-X))``.")

if __name__ == "__main__":
    net = gpunet.Net("example")
    net.add("Swish", ["x"], ["y"])
    ws = gpunet.Workspace(device=sys.argv[1] if len(sys.argv) > 1 else "auto")
    ws.feed("x", np.linspace(-4, 4, 5, dtype=np.float32))
    ws.run_once(net)
    print(ws.fetch("y"))

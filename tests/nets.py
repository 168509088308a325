"""What tests of nets are written with: operators in a line, the devices, and what became of a net."""

from __future__ import annotations

from typing import Any, Final

import pytest

import gpunet
from gpunet.definitions import make_operator
from gpunet.graph import Node
from gpunet.proto import OperatorDef
from tests.sim_kernels import needs_compiler

#: Parameters for a test on the CPU and on the simulated device.
DEVICES: Final = ["cpu", pytest.param("sim:0", marks=needs_compiler)]


def op(type: str, inputs: str, outputs: str, **args: Any) -> OperatorDef:
    """The definition of an operator; names of blobs are separated by spaces."""
    return make_operator(type, inputs.split(), outputs.split(), **args)


def nodes_of(workspace: gpunet.Workspace, net: str = "n") -> list[Node]:
    """The nodes that a net has been compiled to, in order."""
    return [node for segment in workspace.program(net).segments() for node in segment.compiled.graph.nodes]

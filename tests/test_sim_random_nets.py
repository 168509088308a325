"""Random nets, some operators of which are placed on the host: equal on every engine of `sim`."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import gpunet
from gpunet.cuda_kernels.sim import toolchain
from gpunet.proto import PROTO_CPU, NetDef
from gpunet.races import find_races
from gpunet.records import check_races, record_run
from tests.test_engines import OPTIONAL, feed_inputs, nets

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="the simulated device needs a C++ compiler")

ENGINES = [
    {"engine": "simple"},
    {"engine": "async_scheduling", "streams": 3, "workers": 2},
    {"engine": "graph", "streams": 2},
]


@st.composite
def mixed_nets(draw: st.DrawFn) -> NetDef:
    """Random nets with random operators pinned to the host."""
    net = draw(nets())
    for op in net.op:
        if draw(st.integers(0, 3)) == 0:
            op.device_option.device_type = PROTO_CPU
    return net


def outcome(net: NetDef, device: str, **options) -> dict[str, np.ndarray]:
    ws = gpunet.Workspace(device)
    feed_inputs(ws, net)
    ws.create(net, **options)
    # The graph engine captures in its second run and replays from then on.
    if device == "cpu":
        ws.run(net.name, 3)
    else:
        assert not find_races(record_run(ws, net.name, 3)), "in what ran"
    assert not check_races(ws.program(net.name)), "in what was planned"
    return {name: ws.fetch(name) for name in [*net.external_output, "x0", "x1", "x2"]}


@hypothesis.given(mixed_nets())
@hypothesis.settings(max_examples=60)
def test_every_engine_gives_the_same_bits_and_those_of_the_cpu_but_for_rounding(net):
    cpu = outcome(net, "cpu")
    results = [
        outcome(net, "sim:0", without=without, **engine) for engine in ENGINES for without in ((), OPTIONAL)
    ]
    for name, value in cpu.items():
        np.testing.assert_allclose(results[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result[name], results[0][name], err_msg=f"{name}, way {number}")

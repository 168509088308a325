"""Whole nets, trained for a few steps, against what the original Caffe2 computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpunet
from gpunet.proto import NetDef

FOLDER = Path(__file__).parent / "golden" / "nets"
GRAPH_ONLY = {"resnet50"}
FILES = sorted(path for path in FOLDER.glob("*.npz") if path.stem not in GRAPH_ONLY)


def by_prefix(file: Any, prefix: str) -> dict[str, np.ndarray]:
    """The arrays `prefix/REST` of a file, by REST."""
    return {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}


def agree(workspace: gpunet.Workspace, wanted: dict[str, np.ndarray], when: str, *, atol: float) -> None:
    for name, value in wanted.items():
        got = workspace.fetch(name)
        assert got.dtype == value.dtype, f"{name} {when}"
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=atol, err_msg=f"{name} {when}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_training_gives_what_caffe2_gives(path: Path) -> None:
    workspace = gpunet.Workspace("cpu")
    with np.load(path, allow_pickle=False) as file:
        workspace.run_once(file["init_net"].tobytes())
        for prefix in ("init/", "feed/"):
            for name, value in by_prefix(file, prefix).items():
                workspace.feed(name, value)
        net = workspace.create(file["net"].tobytes())
        steps = sorted({int(key.split("/")[1]) for key in file.files if key.startswith("step/")})
        assert steps == list(range(len(steps)))
        assert steps
        for step in steps:
            workspace.run(net)
            # Losses and accuracies: near 1, so that relative agreement is all that is asked.
            agree(workspace, by_prefix(file, f"step/{step}/"), f"after step {step}", atol=0)
        final = by_prefix(file, "final/")
        assert set(json.loads(str(file["meta"]))["params"]) <= set(final)
        agree(workspace, final, "at the end", atol=1e-5)


def test_shapes_of_a_graph_of_caffe2() -> None:
    """ResNet-50 with its backward pass and updates: every shape is known before anything runs."""
    with np.load(FOLDER / "resnet50.npz", allow_pickle=False) as file:
        init_net, net = (NetDef.FromString(file[key].tobytes()) for key in ("init_net", "net"))
    whole = NetDef(op=[*init_net.op, *net.op])
    given = {"data": ((2, 3, 224, 224), np.float32), "label": ((2,), np.int32)}
    inferred = gpunet.infer(whole, given)
    assert {name for op in whole.op for name in op.output} - set(inferred) == {"iteration_mutex"}
    pooled = {op.type: inferred[op.output[0]][0] for op in net.op if op.type in ("MaxPool", "AveragePool")}
    assert pooled == {"MaxPool": (2, 64, 56, 56), "AveragePool": (2, 2048, 1, 1)}
    gradients = [
        name for name in inferred if name.endswith("_grad") and name.removesuffix("_grad") in inferred
    ]
    assert len(gradients) > len(net.op) / 4
    assert [name for name in gradients if inferred[name] != inferred[name.removesuffix("_grad")]] == []

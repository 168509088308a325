"""A training step: forward, backward and update, against the same model and optimizer in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import gpunet
from gpunet.errors import GpunetError
from gpunet.optimizers import SGD
from gpunet.zoo import build

from . import counterpart
from .rows import Bar, Row, Samples
from .timing import Effort, compare

FIGURE = "training"
CLASSES = 10
RATE, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
#: Losses of the first steps agree to this, relatively, or the two do not train the same thing.
AGREEMENT = 1e-3


class Case(NamedTuple):
    """A model of the zoo and its batch."""

    model: str
    batch: int
    channels: int
    side: int

    @property
    def title(self) -> str:
        """For the table."""
        return f"{self.model} step, {self.batch}x{self.channels}x{self.side}x{self.side}"


CASES = (Case("lenet", 64, 1, 28), Case("resnet20", 32, 3, 32))


class DisagreementError(GpunetError):
    """The two sides do not compute the same."""


def measure(effort: Effort) -> list[Row]:
    """Rows for LeNet and ResNet-20; with a quarter of the batch if it is quick."""
    cases = [case._replace(batch=case.batch // 4) if effort.quick else case for case in CASES]
    return [_measure(case, effort) for case in cases]


def batch(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, the same every time."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(case.batch, case.channels, case.side, case.side)).astype(np.float32)
    return images, rng.integers(0, CLASSES, case.batch, dtype=np.int32)


def make_model(case: Case) -> gpunet.Model:
    """The model with gradients and updates."""
    model = build(case.model, (case.channels, case.side, case.side), CLASSES)
    model.add_gradients("loss")
    SGD(learning_rate=RATE, momentum=MOMENTUM, weight_decay=DECAY).apply(model)
    return model


def start(case: Case) -> tuple[gpunet.Model, gpunet.Workspace, Callable[[], float]]:
    """A model, the workspace with its first values, and a step.

    The step feeds the batch, runs the net and returns the loss.
    """
    model = make_model(case)
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    net = workspace.create(model.net)
    images, labels = batch(case)

    def step() -> float:
        workspace.feed("data", images)
        workspace.feed("label", labels)
        workspace.run(net)
        return float(workspace.fetch("loss"))

    return model, workspace, step


def _torch_step(case: Case, model: gpunet.Model, workspace: gpunet.Workspace) -> Callable[[], float]:
    """The same step from the same parameters."""
    torch = counterpart.torch()
    network = getattr(counterpart, case.model)(case.channels, case.side, CLASSES)
    decayed: list[Any] = []
    plain: list[Any] = []
    for ours, theirs in zip(model.params, network.parameters(), strict=True):
        with torch.no_grad():
            theirs.copy_(torch.from_numpy(workspace.fetch(ours.name).copy()))
        (decayed if ours.decay else plain).append(theirs)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM)
    loss_of = torch.nn.CrossEntropyLoss()
    images, labels = batch(case)

    def step() -> float:
        loss = loss_of(network(torch.from_numpy(images)), torch.from_numpy(labels).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _measure(case: Case, effort: Effort) -> Row:
    model, workspace, own = start(case)
    contenders: dict[str, Callable[[], object]] = {"gpunet": own}
    if counterpart.INSTALLED:
        other = _torch_step(case, model, workspace)
        _check(case, own, other)
        contenders["torch"] = other
    result = compare(contenders, effort)
    return Row(
        FIGURE,
        case.title,
        own=Samples.of(result.seconds["gpunet"].values, 1e3),
        other=Samples.of(result.seconds["torch"].values, 1e3) if counterpart.INSTALLED else None,
        counterpart=counterpart.NAME,
        ratios=result.ratios.get("torch"),
        bar=Bar(1.2),
    )


def _check(case: Case, own: Callable[[], float], other: Callable[[], float]) -> None:
    ours, theirs = ([step() for _ in range(3)] for step in (own, other))
    if not np.allclose(ours, theirs, rtol=AGREEMENT):
        raise DisagreementError(f"{case.title}: losses {ours}, wanted those of torch, {theirs}")

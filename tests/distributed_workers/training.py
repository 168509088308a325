"""Trains on the ranks of a job, and prints the losses of all courses that are asked for as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import suppress
from typing import Any

import numpy as np

import gpunet
from gpunet.data import Batches, Dataset, load_dataset
from gpunet.distributed import world
from gpunet.distributed.data_parallel import parallelize, synchronize_batch_norm
from gpunet.optimizers import SGD
from gpunet.training import CheckpointFolder, Ranks, Settings, make_trainer
from gpunet.training.history import Step
from gpunet.training.trainer import Quiet
from gpunet.zoo import build, lookup

STEPS = 20
#: Model, batch size, learning rate, compression, micro-batches, synchronised batch norm. The residual network
#: has a tiny rate, and a seed of its own: it has kinks. Where an input of ReLU is 0 but for rounding, the
#: last bit decides whether a gradient is passed on. What that changes is small, but no rounding error, and it
#: grows with every update. With some seeds such an input comes up within the steps, and losses differ by
#: 1e-5; with this one they differ by 1e-6. :func:`usual_rate` has steps at the usual rate.
COURSES: dict[str, tuple[str, int, float, str, int, bool]] = {
    "mlp": ("mlp", 14, 0.05, "none", 1, True),
    "lenet": ("lenet", 14, 0.02, "none", 1, True),
    "resnet": ("resnet20", 14, 1e-5, "none", 1, True),
    "few": ("mlp", 3, 0.02, "none", 1, True),
    "parts": ("mlp", 14, 0.05, "none", 2, True),
    "float16": ("lenet", 14, 0.01, "float16", 1, True),
    "feedback": ("mlp", 14, 0.02, "float16+feedback", 1, True),
    "powersgd": ("mlp", 14, 0.02, "powersgd:4", 1, True),
    "half": ("lenet", 14, 0.002, "none", 1, True),
    "bfloat16": ("lenet", 14, 0.02, "bfloat16", 1, True),
    "bfloat16_feedback": ("mlp", 14, 0.02, "bfloat16+feedback", 1, True),
    "bfloat16_half": ("lenet", 14, 0.002, "bfloat16", 1, True),
    "unsynced": ("resnet20", 14, 1e-5, "none", 1, False),
}
SEEDS = {"resnet": 4, "unsynced": 4}


def data() -> Dataset:
    digits = load_dataset("digits")
    return Dataset(
        digits.train_images[:100],
        digits.train_labels[:100],
        digits.test_images[:21],
        digits.test_labels[:21],
        digits.classes,
        "some digits",
    )


def course(name: str, *, alone: bool) -> dict[str, Any]:
    """Losses of the steps, and the score of each epoch; ``alone`` trains without other ranks and options."""
    model, batch, rate, compression, parts, synced = COURSES[name]
    dataset = data()
    if model == "lenet":
        dataset = Dataset(
            *(np.kron(x, np.ones((1, 1, 4, 4), np.float32)) if x.ndim == 4 else x for x in (
                dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels)),
            dataset.classes,
            dataset.name,
        )  # fmt: skip
    epochs = -(-STEPS * batch // 100)
    trainer = make_trainer(
        Settings.of(
            model,
            SEEDS.get(name, 3),
            epochs=epochs,
            batch_size=batch,
            learning_rate=rate,
            max_shift=1,
            precision={"half": "float16", "bfloat16_half": "bfloat16"}.get(name, "float32"),
        ),
        dataset,
        device="cpu",
        # Checks after every step that all ranks have the same bits.
        ranks=None if alone else Ranks(compression, 0.05, synced, parts, verify_every=1),
    )
    history = trainer.run()
    return {
        "losses": [step.loss for step in history.steps][:STEPS],
        "accuracies": [step.accuracy for step in history.steps][:STEPS],
        "scores": [epoch.test_loss for epoch in history.epochs],
    }


def smooth(*, alone: bool) -> list[float]:
    """Losses of a network with batch normalization and no kinks."""
    dataset, ranks, batch = data(), world(), 14
    model = gpunet.Model("smooth")
    x = model.input("data", (batch, 1, 8, 8))
    model.input("label", (batch,), "int32")
    for i in range(3):
        convolved = model.conv(x, f"conv{i}", 8, 3, pad=1, bias=False)
        x = model.tanh(model.spatial_bn(convolved, f"bn{i}"), f"tanh{i}")
    model.add("SoftmaxWithLoss", [model.fc(x, "scores", 10), "label"], ["softmax", "loss"])
    if not alone:
        synchronize_batch_norm(model)
    model.add_gradients("loss")
    parallel = None if alone else parallelize(model, bucket_bytes=2000, metrics=["loss"])
    SGD(0.02, momentum=0.9, weight_decay=1e-3, clip_norm=1.0).apply(model)
    workspace = gpunet.Workspace("cpu", seed=1)
    workspace.run_once(model.init_net)
    shard = (0, 1) if alone else (ranks.rank, ranks.size)
    batches = Batches(dataset.train_images, dataset.train_labels, batch, seed=1, wrap=True, shard=shard)
    if parallel is not None:
        parallel.start(workspace)
    net = workspace.create(model.net, engine="simple" if alone else "async_scheduling", workers=1)
    losses = []
    for _ in range(STEPS):
        images, labels = batches.next_batch()
        if parallel is not None:
            parallel.set_weight(workspace, len(labels), batches.last_size)
        workspace.feed("data", images)
        workspace.feed("label", labels)
        workspace.run(net)
        losses.append(float(workspace.fetch("loss")))
        if parallel is not None:
            parallel.verify(workspace)
    return losses


class Residual:
    """The residual network as it is trained by default, by one process or by the ranks of this job."""

    def __init__(self, *, parallel: bool) -> None:
        recipe = lookup("resnet20").recipe
        self.model = build("resnet20", (1, 8, 8), 10)
        if parallel:
            synchronize_batch_norm(self.model)
        self.model.add_gradients("loss")
        self.ranks = parallelize(self.model, metrics=["loss"]) if parallel else None
        SGD(recipe.learning_rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay).apply(
            self.model
        )
        self.workspace = gpunet.Workspace("cpu", seed=1)
        self.workspace.run_once(self.model.init_net)
        if self.ranks is not None:
            self.ranks.start(self.workspace)
        shard = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        self.batches = Batches(data().train_images, data().train_labels, 14, seed=1, wrap=True, shard=shard)
        self.gradients = {p.name: p.gradient for p in self.model.params}
        self.net = self.workspace.create(self.model.net, keep=["loss", *self.gradients.values()])

    def step(self) -> dict[str, Any]:
        """Makes one; loss, gradients and updates."""
        images, labels = self.batches.next_batch()
        if self.ranks is not None:
            self.ranks.set_weight(self.workspace, len(labels), self.batches.last_size)
        self.workspace.feed("data", images)
        self.workspace.feed("label", labels)
        before = {name: self.workspace.fetch(name) for name in self.gradients}
        self.workspace.run(self.net)
        return {
            "loss": float(self.workspace.fetch("loss")),
            "gradients": {name: self.workspace.fetch(blob) for name, blob in self.gradients.items()},
            "updates": {name: self.workspace.fetch(name) - value for name, value in before.items()},
        }


def usual_rate(*, alone: bool) -> dict[str, Any]:
    """Steps of the residual network as it is trained by default, of which each begins with the parameters and
    the state that one process has: their losses, and how far gradients and updates are from those of one
    process, the largest of the relative errors of all parameters.
    """
    one, ranks = Residual(parallel=False), None if alone else Residual(parallel=True)
    found: dict[str, Any] = {"losses": [], "gradients": [], "updates": []}
    for _ in range(STEPS):
        if ranks is not None:
            for name in one.model.training_blobs():
                ranks.workspace.feed(name, one.workspace.fetch(name))
        wanted = one.step()
        mine = wanted if ranks is None else ranks.step()
        found["losses"].append(mine["loss"])
        for what in ("gradients", "updates"):
            errors = [
                np.linalg.norm(mine[what][name] - value) / np.linalg.norm(value)
                for name, value in wanted[what].items()
            ]
            found[what].append(float(max(errors)))
    return found


#: Optimizers with shared state: learning rate, and what else is set.
SHARED: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.05, "clip_norm": 0.5},
    "adagrad": {},
    "adadelta": {"learning_rate": 0.5},
    "rmsprop": {"learning_rate": 0.001},
    "adam": {"clip_norm": 0.5},
    "lars": {"learning_rate": 5.0, "clip_norm": 0.5},
    "lamb": {"learning_rate": 0.01, "clip_norm": 0.5},
}


def sharded(name: str, folder: str, *, alone: bool, ends: int = 0) -> list[float]:
    """Losses with the optimizer's state shared between ranks: a run that goes on from a checkpoint where the
    folder has one, and ends after some steps.
    """
    settings = Settings.of("mlp", 3, epochs=3, batch_size=14, optimizer=name, **SHARED[name])
    found = CheckpointFolder(folder) if folder else None
    trainer = make_trainer(
        settings,
        data(),
        device="cpu",
        ranks=None if alone else Ranks(verify_every=1, shard_optimizer=True, bucket_mib=0.05),
        checkpoints=found,
        checkpoint_every=5,
    )
    latest = None if found is None else found.latest()
    if latest is not None:
        trainer.restore(latest)
    if ends:
        while len(trainer.history.steps) < ends:
            trainer.make_step()
        trainer.save()
    else:
        trainer.run()
    return [step.loss for step in trainer.history.steps][:STEPS]


class EndedError(Exception):
    """A run ended in the middle."""


class EndsAt(Quiet):
    """Ends a run in the middle, on all ranks."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, step: Step, total: int, samples: int) -> None:
        """Ends it at a step."""
        if step.step == self.at:
            raise EndedError


def kept(compression: str, folder: str) -> dict[str, Any]:
    """A run with a compressor that keeps something, in one go and in two; digests of all at the end."""
    settings = Settings.of("mlp", 3, epochs=3, batch_size=14, learning_rate=0.02, momentum=0.0, max_shift=1)

    def trainer(name: str) -> Any:
        return make_trainer(
            settings,
            data(),
            device="cpu",
            ranks=Ranks(compression, bucket_mib=0.05),
            checkpoints=CheckpointFolder(f"{folder}/{name}"),
            checkpoint_every=9,
        )

    def outcome(made: Any) -> dict[str, Any]:
        names = [*made.model.training_blobs(), *made.ranks.own_blobs]
        digests = {name: hashlib.sha256(made.workspace.fetch(name).tobytes()).hexdigest() for name in names}
        return {"losses": [s.loss for s in made.history.steps], "digests": world().all_gather_object(digests)}

    whole, first, second = trainer("whole"), trainer("cut"), trainer("cut")
    whole.run()
    with suppress(EndedError):
        first.run(reporter=EndsAt(12))
    world().barrier()
    latest = CheckpointFolder(f"{folder}/cut").latest()
    if latest is None:
        raise SystemExit("there is no checkpoint")
    second.restore(latest)
    second.run()
    return {"whole": outcome(whole), "resumed": outcome(second), "own": len(second.ranks.own_blobs)}


def table(*, alone: bool) -> list[list[float]]:
    """A table whose rows get sparse gradients, other numbers of them on each rank."""
    rows = np.array([4, 0, 4, 2, 2, 1])
    ranks = world()
    model = gpunet.Model("rows")
    model.input("rows", (3,), "int64")
    model.input("factors", (3, 2))
    parameter = model.add_parameter("table", (5, 2), "ConstantFill", value=1.0)
    picked = model.add("Mul", [model.add("Gather", [parameter, "rows"], "picked"), "factors"], "product")
    model.add("SumElements", [picked], "loss")
    model.add_gradients("loss")
    if not alone:
        parallelize(model)
    SGD(0.5).apply(model)
    workspace = gpunet.Workspace("cpu")
    workspace.run_once(model.init_net)
    mine = rows
    if not alone:
        # Rank 0 has none where there are several.
        others = max(1, ranks.size - 1)
        ends = [len(rows) * (r + (ranks.size == 1)) // others for r in range(ranks.size)]
        mine = rows[ends[ranks.rank - 1] if ranks.rank else 0 : ends[ranks.rank]]
        workspace.feed("data_parallel_weight", np.ones(1, np.float32))
    workspace.feed("rows", mine)
    workspace.feed("factors", np.ones((len(mine), 2), np.float32) * (mine[:, None] + 1).astype(np.float32))
    workspace.run_once(model.net)
    return [[float(x) for x in row] for row in workspace.fetch("table")]


def measure(name: str, *, alone: bool) -> Any:
    """What is measured under a name: one of :data:`COURSES`, or a function here."""
    if name in COURSES:
        return course(name, alone=alone)
    kind, *details = name.split("=")
    if kind == "sharded":
        return sharded(details[0], "", alone=alone)
    if kind == "shared":
        return sharded(details[0], details[1], alone=alone, ends=int(details[2]))
    if kind == "kept":
        return kept(*details)
    return {"smooth": smooth, "table": table, "usual_rate": usual_rate}[name](alone=alone)


def main(names: list[str]) -> None:
    """Prints one line of JSON from rank 0."""
    found = {name: measure(name, alone=False) for name in names}
    everywhere = world().all_gather_object(found)
    if any(other != found for other in everywhere):
        raise SystemExit("ranks measured different things")
    if world().rank == 0:
        print("measured " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

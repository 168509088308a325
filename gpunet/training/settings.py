"""The settings of a training run, and the trainer that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpunet.data import Batches, Dataset, ShiftFlip
from gpunet.devices import Device
from gpunet.optimizers import SGD
from gpunet.schedules import Cosine
from gpunet.training.checkpoint import CheckpointFolder
from gpunet.training.trainer import Trainer, steps_of
from gpunet.workspace import Workspace
from gpunet.zoo import Recipe, build, lookup


@dataclass(frozen=True)
class Settings:
    """What decides the course of a run, together with the data.

    Attributes:
        model: a model of the zoo.
        recipe: how it is trained.
        seed: of initial weights, order of the data, and all other random draws.
    """

    model: str
    recipe: Recipe
    seed: int = 0

    @classmethod
    def of(cls, model: str, seed: int = 0, **changes: Any) -> Settings:
        """The model's own recipe with changes, those that are ``None`` left out."""
        recipe = asdict(lookup(model).recipe)
        recipe.update({name: value for name, value in changes.items() if value is not None})
        return cls(model, Recipe(**recipe), seed)

    def config(self, dataset: Dataset) -> dict[str, Any]:
        """What a checkpoint of such a run must agree in, by the names that users know."""
        return {
            "model": self.model,
            "data": fingerprint(dataset),
            **{name.replace("_", "-"): value for name, value in asdict(self.recipe).items()},
            "seed": self.seed,
        }


def fingerprint(dataset: Dataset) -> str:
    """The name of a data set with a part of the SHA-256 (hex) of its images and labels."""
    digest = hashlib.sha256()
    for array in (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels):
        digest.update(f"{array.shape}{array.dtype}".encode())
        digest.update(array.data if array.flags.c_contiguous else array.tobytes())
    return f"{dataset.name} ({digest.hexdigest()[:16]})"


def make_trainer(
    settings: Settings,
    dataset: Dataset,
    *,
    device: str | Device = "auto",
    checkpoints: CheckpointFolder | None = None,
    checkpoint_every: int | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Trainer:
    """A trainer at the start of a run: the model with its gradients and updates, in a workspace of its own.

    Raises:
        ZooError, ShapeError: there is no such model, or it cannot take such images.
        TrainingError, ArgumentError: a setting makes no sense.
        DeviceError: there is no such device here.
    """
    recipe = settings.recipe
    samples = len(dataset.train_labels)
    model = build(settings.model, dataset.train_images.shape[1:], dataset.classes)
    model.add_gradients("loss")
    steps = steps_of(samples, recipe.batch_size, recipe.epochs)
    SGD(
        learning_rate=recipe.learning_rate,
        # Iterations are counted from 1, and the rate would jump back up at the end of the period.
        schedule=Cosine(max_lr=1.0, min_lr=0.0, period=steps + 1),
        momentum=recipe.momentum,
        nesterov=recipe.nesterov and recipe.momentum > 0,
        weight_decay=recipe.weight_decay,
        clip_norm=recipe.clip_norm,
    ).apply(model)
    augment = (
        ShiftFlip(seed=settings.seed, max_shift=recipe.max_shift, flip=False) if recipe.max_shift else None
    )
    batches = Batches(
        dataset.train_images,
        dataset.train_labels,
        recipe.batch_size,
        seed=settings.seed,
        wrap=True,
        augment=augment,
    )
    return Trainer(
        model,
        Workspace(device, seed=settings.seed),
        batches,
        (dataset.test_images, dataset.test_labels),
        epochs=recipe.epochs,
        config=settings.config(dataset),
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        notes=notes,
    )

"""Models that come with gpunet, by name, each with the settings that train it well.

A model takes the blobs ``data`` (float32 ``[N, C, H, W]``) and ``label`` (int32 ``[N]``) and makes
``softmax`` (probabilities ``[N, classes]``), ``loss`` (the mean cross entropy, a scalar) and ``accuracy`` (a
scalar).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpunet.errors import GpunetError, ShapeError
from gpunet.model import Model
from gpunet.specs import Shape, format_shape
from gpunet.zoo.lenet import lenet
from gpunet.zoo.mlp import mlp
from gpunet.zoo.resnet import resnet20

__all__ = ["MODELS", "Recipe", "ZooEntry", "ZooError", "build", "lookup"]


class ZooError(GpunetError, ValueError):
    """A model is asked for that does not exist."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained unless something else is asked for.

    Attributes:
        epochs: passes over the training images.
        batch_size: images a step.
        learning_rate: the highest rate; it falls to 0 along half a cosine.
        momentum: of stochastic gradient descent and LARS.
        nesterov: whether the momentum looks ahead.
        weight_decay: added to the gradients of weights, times the weights.
        clip_norm: greatest norm of all gradients together; 0 does not clip.
        max_shift: images are shifted by up to so many pixels, at random; 0 leaves them.
        optimizer: a name in :data:`gpunet.training.settings.OPTIMIZERS`.
        precision: ``float32``, or ``float16`` or ``bfloat16`` as :mod:`gpunet.mixed_precision` has them.
    """

    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 0.05
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    clip_norm: float = 0.0
    max_shift: int = 0
    optimizer: str = "sgd"
    precision: str = "float32"


@dataclass(frozen=True)
class ZooEntry:
    """A model of the zoo: what builds it, what it is in a few words, and how it is trained."""

    build: Callable[[Model, str, str, int], str]
    doc: str
    recipe: Recipe


MODELS: Final[dict[str, ZooEntry]] = {
    "lenet": ZooEntry(
        lenet,
        "two convolutions with max pooling, two fully connected layers",
        Recipe(batch_size=32, learning_rate=0.03),
    ),
    "mlp": ZooEntry(mlp, "three fully connected layers", Recipe(learning_rate=0.1)),
    "resnet20": ZooEntry(
        resnet20,
        "the residual network of 20 layers for small images",
        Recipe(learning_rate=0.1, weight_decay=1e-4),
    ),
}


def lookup(name: str) -> ZooEntry:
    """The model of this name; an unknown one raises :class:`ZooError` with the names there are."""
    entry = MODELS.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ZooError(f"there is no model {name!r}, wanted one of {', '.join(MODELS)}{hint}")
    return entry


def build(name: str, image_shape: Shape, classes: int) -> Model:
    """A model of the zoo without gradients and updates.

    Args:
        name: one of :data:`MODELS`.
        image_shape: channels, height and width of the images.
        classes: number of classes, at least 2.

    Raises:
        ZooError: there is no such model, or fewer than 2 classes.
        ShapeError: the images do not have three dimensions, or are too small for the model.
    """
    entry = lookup(name)
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ShapeError(
            f"model {name!r}: images of shape {format_shape(tuple(image_shape))}, "
            "wanted channels x height x width"
        )
    if classes < 2:
        raise ZooError(f"model {name!r}: {classes} classes, wanted at least 2")
    model = Model(name)
    data = model.input("data", (1, *image_shape))
    label = model.input("label", (1,), "int32")
    logits = entry.build(model, data, "logits", classes)
    softmax = model.softmax(logits, "softmax")
    # The loss from the logits: exact where a probability rounds to 0 or 1. The model that is saved ends at
    # softmax and needs no labels.
    model.add("SoftmaxWithLoss", [logits, label], ["_loss_softmax", "loss"])
    model.accuracy(softmax, label, "accuracy")
    return model

"""The settings of a training run, and the trainer that they make."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from gpunet import mixed_precision
from gpunet.data import Batches, Dataset, ShiftFlip
from gpunet.devices import Device
from gpunet.large_batch import LAMB, LARS
from gpunet.model import Model
from gpunet.optimizers import SGD, Adadelta, Adagrad, Adam, Optimizer, RmsProp
from gpunet.schedules import Cosine
from gpunet.training.checkpoint import CheckpointFolder, network_hash
from gpunet.training.errors import TrainingError
from gpunet.training.trainer import Trainer, steps_of
from gpunet.workspace import Workspace
from gpunet.zoo import Recipe, build, lookup

if TYPE_CHECKING:
    from gpunet.distributed.data_parallel import DataParallel

#: What a model can be trained in.
PRECISIONS: Final = ("float32", "float16", "bfloat16")

#: What a model can be trained by.
OPTIMIZERS: Final[Mapping[str, type[Optimizer]]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "rmsprop": RmsProp,
    "adam": Adam,
    "lars": LARS,
    "lamb": LAMB,
}

#: Threads that prepare batches ahead, where nobody says how many.
PREFETCH: Final = 1

#: From the seed of one rank to that of the next: large, so that runs with neighbouring seeds share none.
_SEED_STRIDE: Final = 1_000_003


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
        """The model's own recipe with changes, those that are ``None`` left out.

        Another optimizer than the recipe's has its own learning rate, if it has one.
        """
        recipe = asdict(lookup(model).recipe)
        other = OPTIMIZERS.get(changes.get("optimizer") or "")
        if other is not None and changes["optimizer"] != recipe["optimizer"]:
            recipe["learning_rate"] = getattr(other, "learning_rate", recipe["learning_rate"])
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


@dataclass(frozen=True)
class Ranks:
    """How several processes train together. None of it decides what a run is: it can be resumed with others.

    Attributes:
        compression: of gradients; :data:`gpunet.distributed.compression.NAMES`.
        bucket_mib: gradients that are reduced together, in MiB; by default as
            :func:`gpunet.distributed.buckets.bucket_sizes` says.
        sync_batch_norm: batch normalisation over the batches of all ranks, with the same numbers as one
            process on the whole batch; without it each rank's own batch counts, which is quicker.
        micro_batches: parts into which each rank's batch is cut, to save memory.
        verify_every: steps from one check to the next that all ranks have the same parameters; 0 for none.
        shard_optimizer: each rank has one part of the optimizer's state, as
            :mod:`gpunet.distributed.sharding` does it; needs compression ``none``.
    """

    compression: str = "none"
    bucket_mib: float | None = None
    sync_batch_norm: bool = True
    micro_batches: int = 1
    verify_every: int = 0
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        """Refuses what makes no sense, also where one process trains alone and reads none of it."""
        from gpunet.distributed.compression import compressor

        compressor(self.compression)
        if self.bucket_mib is not None and not self.bucket_mib > 0:
            raise TrainingError(f"buckets of {self.bucket_mib:g} MiB, wanted more than 0")


def make_trainer(
    settings: Settings,
    dataset: Dataset,
    *,
    device: str | Device = "auto",
    checkpoints: CheckpointFolder | None = None,
    checkpoint_every: int | None = None,
    notes: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
    prefetch: int = PREFETCH,
) -> Trainer:
    """A trainer at the start of a run: the model with its gradients and updates, in a workspace of its own.

    Args:
        settings: what is trained, and how.
        dataset: what it is trained on.
        device: where; with several ranks, ``auto`` and ``cuda`` are the GPU of the local rank.
        checkpoints: where to save.
        checkpoint_every: steps between checkpoints; ``None`` saves after each epoch.
        notes: what checkpoints also hold.
        ranks: how the ranks of this job train together; ``None`` trains in this process alone.
        prefetch: threads that prepare batches ahead; 0 prepares each when it is needed.

    Raises:
        ZooError, ShapeError: there is no such model, or it cannot take such images.
        TrainingError, ArgumentError: a setting makes no sense.
        DeviceError: there is no such device here.
    """
    recipe = settings.recipe
    samples = len(dataset.train_labels)
    model = build(settings.model, dataset.train_images.shape[1:], dataset.classes)
    if recipe.precision not in PRECISIONS:
        raise TrainingError(f"precision {recipe.precision!r}, wanted one of {', '.join(PRECISIONS)}")
    optimizer = _optimizer(recipe, steps_of(samples, recipe.batch_size, recipe.epochs))
    parallel, network, shard = None, None, (0, 1)
    if ranks is not None:
        from gpunet.distributed import discover, init, local_device

        network = network_hash(_with_updates(settings, dataset, optimizer))
        place = discover()
        if isinstance(device, str) and place.size > 1:
            device = local_device(device, place)
        job = init("auto", device if place.size > 1 else None)
        shard = (job.rank, job.size)
        parallel = _parallelize(model, recipe, ranks, optimizer)
    else:
        _add_gradients(model, recipe)
        optimizer.apply(model)
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
        shard=shard,
    )
    return Trainer(
        model,
        # Rank 0 draws like a process alone; initial parameters are its own everywhere.
        Workspace(device, seed=settings.seed + _SEED_STRIDE * shard[0]),
        batches,
        (dataset.test_images, dataset.test_labels),
        epochs=recipe.epochs,
        config=settings.config(dataset),
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        notes=notes,
        ranks=parallel,
        micro_batches=1 if ranks is None else ranks.micro_batches,
        verify_every=0 if ranks is None else ranks.verify_every,
        network=network,
        seed=settings.seed,
        prefetch=prefetch,
    )


def _add_gradients(model: Model, recipe: Recipe) -> None:
    """Gradients in the recipe's precision."""
    if recipe.precision != "float32":
        mixed_precision.to_half(model, recipe.precision)
    if recipe.precision == "float16":
        mixed_precision.add_scaled_gradients(model, "loss")
    else:
        model.add_gradients("loss")


def _optimizer(recipe: Recipe, steps: int) -> Optimizer:
    kind = OPTIMIZERS.get(recipe.optimizer)
    if kind is None:
        raise TrainingError(f"optimizer {recipe.optimizer!r}, wanted one of {', '.join(OPTIMIZERS)}")
    more: dict[str, Any] = {}
    if issubclass(kind, SGD):
        more = {"momentum": recipe.momentum, "nesterov": recipe.nesterov and recipe.momentum > 0}
    return kind(
        learning_rate=recipe.learning_rate,
        # Iterations are counted from 1, and the rate would jump back up at the end of the period.
        schedule=Cosine(max_lr=1.0, min_lr=0.0, period=steps + 1),
        weight_decay=recipe.weight_decay,
        clip_norm=recipe.clip_norm,
        **more,
    )


def _with_updates(settings: Settings, dataset: Dataset, optimizer: Optimizer) -> Model:
    """The model as one process trains it."""
    model = build(settings.model, dataset.train_images.shape[1:], dataset.classes)
    _add_gradients(model, settings.recipe)
    optimizer.apply(model)
    return model


def _parallelize(model: Model, recipe: Recipe, ranks: Ranks, optimizer: Optimizer) -> DataParallel:
    """Gradients of a model, as the mean over all ranks, and updates."""
    from gpunet.distributed.buckets import MEBI
    from gpunet.distributed.compression import NoCompression, TopK, compressor
    from gpunet.distributed.data_parallel import parallelize, synchronize_batch_norm
    from gpunet.distributed.sharding import shard_optimizer

    compression = compressor(ranks.compression)
    if ranks.shard_optimizer and not isinstance(compression, NoCompression):
        raise TrainingError(
            f"compression {compression.name} with shared optimizer state (--shard-optimizer), wanted "
            "--compression none, or whole state: shared state scatters gradients"
        )
    if isinstance(compression, TopK) and compression.momentum and getattr(optimizer, "momentum", 0):
        raise TrainingError(
            f"compression {compression.name} has momentum {compression.momentum:g} and the optimizer "
            f"{recipe.momentum:g}, wanted one of them to be 0: --momentum 0, or --compression "
            f"topk:{compression.ratio:g}:0"
        )
    if ranks.micro_batches < 1:
        raise TrainingError(f"{ranks.micro_batches} micro-batches, wanted at least 1")
    if ranks.sync_batch_norm:
        synchronize_batch_norm(model)
    # The scale of a float16 loss follows from reduced gradients, so it is the same on all ranks.
    _add_gradients(model, recipe)
    size = None if ranks.bucket_mib is None else max(1, int(ranks.bucket_mib * MEBI))
    options: dict[str, Any] = {
        "bucket_bytes": size,
        "metrics": ("loss", "accuracy"),
        "accumulate": ranks.micro_batches > 1,
    }
    if ranks.shard_optimizer:
        return shard_optimizer(model, optimizer, **options)
    parallel = parallelize(model, compression=compression, **options)
    optimizer.apply(model)
    return parallel

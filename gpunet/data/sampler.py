"""Batches in a reproducible order, with a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpunet import philox
from gpunet.data.errors import DatasetError

_OPERATOR = philox.operator_id("gpunet.data", "order")

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
#: Takes images [N, C, H, W], their positions in the data set [N] and the epoch; returns the images to use.
Augment = Callable[[Images, Indices, int], Images]


@dataclass(frozen=True)
class Plan:
    """Which samples make up a batch.

    Attributes:
        parts: positions in the data set of this rank's samples, int64 [n], with the epoch of each part.
        size: samples of the batch, of all ranks together.
        begin: epoch, and the samples of it given out before, at the start of the batch.
        end: the same behind it.
    """

    parts: tuple[tuple[Indices, int], ...]
    size: int
    begin: tuple[int, int]
    end: tuple[int, int]


class Batches:
    """Goes through images and labels in epochs, each sample once an epoch.

    The order of epoch ``e`` is the stable argsort of the 64-bit keys ``v[0] .. v[N-1]`` of the Philox draw
    (seed, ``operator_id("gpunet.data", "order")``, ``e``), ``v[i]`` as in `gpunet.philox`; without
    shuffling it is 0 .. N-1. It depends on nothing else, so a position is two numbers, the epoch and the
    samples used of it.

    What happens where the batch size does not divide the samples left: by default the last batch of an
    epoch is short; ``drop_last`` leaves those samples out; ``wrap`` fills the batch up with the first
    samples of the next epoch, which go on after them, so that every batch is full and still no sample is
    lost or repeated.

    With ``shard=(rank, ranks)`` it gives out one rank's part of each batch: consecutive samples, as many for
    each rank as for any other or one more, for some none where there are more ranks than samples. Order and
    position are those of whole batches, so they can be restored with another number of ranks.

    Attributes:
        images: float32 [N, C, H, W].
        labels: int32 [N].
        batch_size: samples a batch.
        epoch: the epoch that the next batch starts in, from 0.
        position: the samples of that epoch that were given out before.
        last_size: samples of the last batch, of all ranks together; 0 before the first.
    """

    def __init__(
        self,
        images: Images,
        labels: Labels,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        wrap: bool = False,
        augment: Augment | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """Starts at the beginning of epoch 0; the arrays are kept, not copied.

        Raises:
            DatasetError: the arrays are empty or of different lengths, ``batch_size`` is not positive, it
                is above the number of samples with ``drop_last``, both ``drop_last`` and ``wrap`` are asked
                for, or there is no such shard.
        """
        samples = len(labels)
        if len(images) != samples or samples == 0:
            raise DatasetError(
                f"Batches: {len(images)} images and {samples} labels, wanted equal numbers, not 0"
            )
        if batch_size < 1 or (drop_last and batch_size > samples):
            wanted = f"1 to {samples} with drop_last" if drop_last else "1 or more"
            raise DatasetError(f"Batches: batch_size is {batch_size}, wanted {wanted}")
        if drop_last and wrap:
            raise DatasetError("Batches: drop_last and wrap exclude each other")
        if not 0 <= shard[0] < shard[1]:
            raise DatasetError(f"Batches: shard is {shard}, wanted a rank below the number of ranks")
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.epoch, self.position, self.last_size = 0, 0, 0
        self._shard = shard
        self._seed, self._shuffle, self._augment = seed, shuffle, augment
        self._drop_last, self._wrap = drop_last, wrap
        self._order: Indices = np.empty(0, dtype=np.int64)
        self._order_epoch = -1

    def __len__(self) -> int:
        """The number of batches that start in this epoch from the present position on."""
        left = len(self.labels) - self.position
        return left // self.batch_size if self._drop_last else -(-left // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Images, Labels]]:
        """The batches that start in this epoch from the present position on."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def order(self, epoch: int) -> Indices:
        """The positions of all samples in the data set in the order of ``epoch``, int64 [N]."""
        if epoch != self._order_epoch:
            count = len(self.labels)
            if self._shuffle:
                words = philox.raw(self._seed, _OPERATOR, epoch, 2 * count).astype(np.uint64)
                keys = words[0::2] | words[1::2] << np.uint64(32)
                self._order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
            else:
                self._order = np.arange(count, dtype=np.int64)
            self._order_epoch = epoch
        return self._order

    def next_batch(self) -> tuple[Images, Labels]:
        """The next images [B, C, H, W] and labels [B], of this rank, going on to the next epoch where one
        ends.

        The position is already behind this batch when it is returned: saved now, it continues with the one
        after.
        """
        return self.make(self.plan())

    def plan(self) -> Plan:
        """Chooses the samples of the next batch and goes behind it, without touching the data."""
        begin = self.epoch, self.position
        parts = [self._take(self.batch_size)]
        while self._wrap and (missing := self.batch_size - sum(len(part) for part, _ in parts)) > 0:
            parts.append(self._take(missing))
        self.last_size = sum(len(indices) for indices, _ in parts)
        rank, ranks = self._shard
        first, last = (self.last_size * r // ranks for r in (rank, rank + 1))
        mine, passed = [], 0
        for indices, epoch in parts:
            chosen = indices[max(0, first - passed) : max(0, last - passed)]
            passed += len(indices)
            if len(chosen):
                mine.append((chosen, epoch))
        return Plan(tuple(mine), self.last_size, begin, (self.epoch, self.position))

    def make(self, plan: Plan) -> tuple[Images, Labels]:
        """The images and labels of a plan; threads may make several at once."""
        made = [(self._images(chosen, epoch), self.labels[chosen]) for chosen, epoch in plan.parts]
        if len(made) == 1:
            return made[0]
        if not made:
            return self.images[:0], self.labels[:0]
        return np.concatenate([part[0] for part in made]), np.concatenate([part[1] for part in made])

    def go_behind(self, plan: Plan) -> None:
        """Makes the position that behind a batch which was planned by a copy of this object."""
        (self.epoch, self.position), self.last_size = plan.end, plan.size

    def _take(self, count: int) -> tuple[Indices, int]:
        """Up to ``count`` samples of the present epoch, by their positions in the data set, and the epoch."""
        epoch, samples = self.epoch, len(self.labels)
        indices = self.order(epoch)[self.position : self.position + count]
        self.position += len(indices)
        needed = self.batch_size if self._drop_last else 1
        if samples - self.position < needed:
            self.epoch, self.position = epoch + 1, 0
        return indices, epoch

    def _images(self, indices: Indices, epoch: int) -> Images:
        images = self.images[indices]
        return images if self._augment is None else self._augment(images, indices, epoch)

    def state(self) -> dict[str, int]:
        """The position, and what it only makes sense with, as whole numbers for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def _identity(self) -> dict[str, int]:
        return {"samples": len(self.labels), "seed": self._seed, "shuffle": int(self._shuffle)}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes to a position that `state` gave; the batch size and the augmentation may be others.

        Raises:
            DatasetError: the state is incomplete, of another number of samples, seed or shuffling, or its
                position is outside the data.
        """
        wanted = self._identity()
        missing = [key for key in ("epoch", "position", *wanted) if key not in state]
        if missing:
            raise DatasetError(
                f"Batches: the saved position lacks {', '.join(missing)}; it has {sorted(state)}"
            )
        for key, value in wanted.items():
            if state[key] != value:
                raise DatasetError(
                    f"Batches: the saved position is for {key} {state[key]}, this data has {value}"
                )
        epoch, position = state["epoch"], state["position"]
        last = len(self.labels) - (self.batch_size if self._drop_last else 1)
        if epoch < 0 or not 0 <= position <= last:
            raise DatasetError(
                f"Batches: saved epoch {epoch}, position {position}; wanted epoch >= 0, 0 to {last}"
            )
        self.epoch, self.position = epoch, position

"""Accuracy and loss of a model on held-out samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpunet.errors import ShapeError
from gpunet.model import Model
from gpunet.workspace import Workspace

if TYPE_CHECKING:
    from gpunet.distributed import Communicator

_SMALLEST_PROBABILITY = 1e-20


@dataclass(frozen=True)
class Score:
    """Mean cross entropy, and the share of the samples whose most probable class is the label."""

    loss: float
    accuracy: float
    samples: int


class Evaluator:
    """Runs a model's inference net, in the workspace where it is trained.

    Args:
        model: the model.
        workspace: holds its parameters.
        data: the input blob.
        probabilities: the blob of probabilities, ``[N, classes]``.
        batch_size: samples a run.
    """

    def __init__(
        self,
        model: Model,
        workspace: Workspace,
        *,
        data: str = "data",
        probabilities: str = "softmax",
        batch_size: int = 256,
    ) -> None:
        self._workspace = workspace
        self._data, self._probabilities, self._batch_size = data, probabilities, batch_size
        self._net = workspace.create(model.predict_net(probabilities), overwrite=True)

    def probabilities(self, images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The probabilities ``[N, classes]`` of images ``[N, C, H, W]``."""
        parts = []
        for start in range(0, len(images), self._batch_size):
            self._workspace.feed(self._data, images[start : start + self._batch_size])
            self._workspace.run(self._net)
            parts.append(self._workspace.fetch(self._probabilities))
        return np.concatenate(parts)

    def score(self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int32]) -> Score:
        """Loss and accuracy, each sample counted once.

        Raises:
            ShapeError: there are no samples, or not as many labels as images.
        """
        if len(images) != len(labels) or len(labels) == 0:
            raise ShapeError(
                f"{len(images)} images and {len(labels)} labels to evaluate, wanted equal numbers, not 0"
            )
        losses, right = self._measure(images, labels)
        return Score(float(losses.mean()), float(np.mean(right)), len(labels))

    def score_together(
        self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int32], ranks: Communicator
    ) -> Score:
        """What :meth:`score` gives, with the samples shared between ranks, each of which has all of them.

        All ranks get the same score. Raises :class:`ShapeError` as :meth:`score`.
        """
        if len(images) != len(labels) or len(labels) == 0:
            raise ShapeError(
                f"{len(images)} images and {len(labels)} labels to evaluate, wanted equal numbers, not 0"
            )
        begin, end = (len(labels) * r // ranks.size for r in (ranks.rank, ranks.rank + 1))
        sums = np.zeros(2, np.float64)
        if end > begin:
            losses, right = self._measure(images[begin:end], labels[begin:end])
            sums[:] = losses.sum(), right.sum()
        ranks.all_reduce(sums)
        return Score(float(sums[0] / len(labels)), float(sums[1] / len(labels)), len(labels))

    def _measure(
        self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Cross entropy of each sample, and whether its most probable class is the label."""
        p = self.probabilities(images)
        chosen = p[np.arange(len(labels)), labels].astype(np.float64)
        return -np.log(np.maximum(chosen, _SMALLEST_PROBABILITY)), p.argmax(axis=1) == labels

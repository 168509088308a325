"""The figures that there are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Final

from .rows import Row
from .timing import Effort


@dataclass(frozen=True)
class Figure:
    """A figure: the module that measures it, and what it is in a line."""

    module: str
    doc: str

    def measure(self, effort: Effort) -> list[Row]:
        """Its rows."""
        rows: list[Row] = importlib.import_module(f".{self.module}", __package__).measure(effort)
        return rows


FIGURES: Final[dict[str, Figure]] = {
    "convolution": Figure(
        "layers", "forward and backward passes of the convolutions of LeNet, ResNet-20 and ResNet-18"
    ),
    "training": Figure("training", "a training step of LeNet and of ResNet-20"),
    "overhead": Figure("overhead", "what a net of 200 tiny operators costs beside its NumPy calls"),
    "memory": Figure("memory", "peak memory of training steps, over all tensors that live"),
    "programs": Figure("programs", "memory plans against their lower bound, recomputation, planning time"),
    "lanes": Figure("lanes", "nets of four branches with two lanes, against operators one after another"),
    "import": Figure("startup", "importing gpunet in a fresh process"),
    "digits": Figure("digits", "`gpunet train lenet` on digits, 10 epochs"),
}

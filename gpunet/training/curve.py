"""The course of training as a picture."""

from __future__ import annotations

import importlib.util
import io
import os

from gpunet.serialization import atomic_write
from gpunet.training.history import History

#: How to get what :func:`save_curve` needs.
INSTALL_HINT = "pip install 'gpunet[plot]'"


def can_draw() -> bool:
    """Whether matplotlib is installed (extra ``plot``)."""
    return importlib.util.find_spec("matplotlib") is not None


def save_curve(path: str | os.PathLike[str], history: History, title: str) -> None:
    """Draws the loss of each step, and loss and accuracy of each epoch, into a PNG file. Needs no display.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps, epochs = history.steps, history.epochs
    ends = [history.steps_of(e.epoch)[-1].step for e in epochs]
    left.plot([s.step for s in steps], [s.loss for s in steps], linewidth=0.6, alpha=0.5, label="each step")
    left.plot(ends, [e.loss for e in epochs], marker="o", markersize=3, label="training")
    left.plot(ends, [e.test_loss for e in epochs], marker="o", markersize=3, label="held out")
    left.set(xlabel="step", ylabel="loss", yscale="log")
    right.plot(
        ends, [100 * e.accuracy for e in epochs], marker="o", markersize=3, color="C1", label="training"
    )
    right.plot(
        ends, [100 * e.test_accuracy for e in epochs], marker="o", markersize=3, color="C2", label="held out"
    )
    right.set(xlabel="step", ylabel="accuracy, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    atomic_write(path, picture.getvalue())

"""A multilayer perceptron."""

from __future__ import annotations

from gpunet.model import Model

_HIDDEN_UNITS = (256, 128)


def mlp(model: Model, data: str, name: str, classes: int) -> str:
    """Adds two hidden layers of 256 and 128 rectified units and a layer ``name`` with a score for each class.

    Images of any size fit: ``data`` is ``[N, ...]``; the scores are ``[N, classes]``.
    """
    x = data
    for number, units in enumerate(_HIDDEN_UNITS, start=1):
        x = model.relu(model.fc(x, f"fc{number}", units, weight_filler="MSRAFill"))
    return model.fc(x, name, classes)

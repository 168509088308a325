"""PyTorch, where it is installed, and the networks of the zoo written for it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

INSTALLED = importlib.util.find_spec("torch") is not None
#: What a row says in place of a ratio.
MISSING = "torch not installed"
NAME = "torch" if INSTALLED else MISSING


def torch() -> Any:
    """The module; only where it is :data:`INSTALLED`."""
    return importlib.import_module("torch")


def lenet(channels: int, side: int, classes: int) -> Any:
    """The network of :mod:`gpunet.zoo.lenet` for images of at least 16x16; parameters in the same order."""
    nn = torch().nn
    left = ((side - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * left * left, 500),
        nn.ReLU(),
        nn.Linear(500, classes),
    )


def resnet20(channels: int, side: int, classes: int) -> Any:
    """The network of :mod:`gpunet.zoo.resnet`; parameters in the same order."""
    nn = torch().nn

    def conv_bn(inputs: int, outputs: int, kernel: int, stride: int) -> Any:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.branch = nn.Sequential(
                conv_bn(inputs, outputs, 3, stride), nn.ReLU(inplace=True), conv_bn(outputs, outputs, 3, 1)
            )
            same = inputs == outputs and stride == 1
            self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Any) -> Any:
            return self.relu(self.branch(x) + self.shortcut(x))

    layers = [conv_bn(channels, 16, 3, 1), nn.ReLU(inplace=True)]
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(Block(inputs, outputs, 2 if outputs > 16 and block == 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(side // 4), nn.Flatten(), nn.Linear(64, classes))

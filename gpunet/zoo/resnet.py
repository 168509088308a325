"""The residual network of 20 layers for small images (He et al., https://arxiv.org/abs/1512.03385, 4.2)."""

from __future__ import annotations

from gpunet.model import Model

_WIDTHS = (16, 32, 64)
_BLOCKS_PER_STAGE = 3


def resnet20(model: Model, data: str, name: str, classes: int) -> str:
    """Adds a convolution, nine residual blocks, the mean over the image, and a layer ``name`` of scores.

    The blocks form three stages of three with 16, 32 and 64 channels. Stages after the first halve the
    image. Where a block changes the shape, its shortcut is a 1x1 convolution; elsewhere it is the identity.
    Weights start as for rectified units (MSRAFill), and every convolution is followed by batch normalisation.
    """
    x = model.relu(_conv_bn(model, data, "conv1", _WIDTHS[0], 3, 1))
    for stage, channels in enumerate(_WIDTHS, start=1):
        for block in range(1, _BLOCKS_PER_STAGE + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            x = _residual_block(model, x, f"res{stage}_{block}", channels, stride)
    x = model.average_pool(x, "pool")
    return model.fc(x, name, classes)


def _residual_block(model: Model, x: str, name: str, channels: int, stride: int) -> str:
    branch = model.relu(_conv_bn(model, x, f"{name}_conv1", channels, 3, stride))
    branch = _conv_bn(model, branch, f"{name}_conv2", channels, 3, 1)
    shortcut = x
    if model.shape_of(x) != model.shape_of(branch):
        shortcut = _conv_bn(model, x, f"{name}_shortcut", channels, 1, stride)
    return model.relu(model.sum([branch, shortcut], name))


def _conv_bn(model: Model, x: str, name: str, channels: int, kernel: int, stride: int) -> str:
    x = model.conv(
        x, name, channels, kernel, stride=stride, pad=kernel // 2, bias=False, weight_filler="MSRAFill"
    )
    return model.spatial_bn(x, f"{name}_bn")

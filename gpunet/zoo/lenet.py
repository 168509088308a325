"""LeNet-5 as Caffe trains it on MNIST (LeCun et al., https://doi.org/10.1109/5.726791)."""

from __future__ import annotations

from gpunet.errors import ShapeError
from gpunet.model import Model
from gpunet.specs import format_shape

#: Images at least this high and wide keep a pixel after two 5x5 convolutions and two poolings.
_SIDE_FOR_5X5 = 16
_SMALLEST_SIDE = 4


def lenet(model: Model, data: str, name: str, classes: int) -> str:
    """Adds two convolutions with max pooling, 500 hidden units, and a layer ``name`` of class scores.

    The convolutions have 20 and 50 filters of 5x5 without padding, as in the original. Images smaller than
    16x16 would vanish under them: those get 3x3 filters with padding, so that only the poolings shrink the
    image.

    Raises:
        ShapeError: the images are smaller than 4x4.
    """
    shape = model.shape_of(data)
    side = min(shape[2:])
    if side < _SMALLEST_SIDE:
        raise ShapeError(
            f"model 'lenet': images of {format_shape(shape[2:])} pixels, "
            f"wanted at least {_SMALLEST_SIDE}x{_SMALLEST_SIDE}"
        )
    kernel, pad = (5, 0) if side >= _SIDE_FOR_5X5 else (3, 1)
    x = model.conv(data, "conv1", 20, kernel, pad=pad)
    x = model.max_pool(x, "pool1", 2)
    x = model.conv(x, "conv2", 50, kernel, pad=pad)
    x = model.max_pool(x, "pool2", 2)
    x = model.relu(model.fc(x, "fc3", 500))
    return model.fc(x, name, classes)

"""Images for prediction: NumPy arrays and, with Pillow, pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpunet.data.errors import DatasetError
from gpunet.errors import FormatError

if TYPE_CHECKING:
    from PIL import Image

_NPY_MAGIC = b"\x93NUMPY"
_GRAY_MODES = ("1", "L", "LA", "La")


def load_image(
    path: str | os.PathLike[str], *, channels: int | None = None, size: tuple[int, int] | None = None
) -> npt.NDArray[np.float32]:
    """Reads a ``.npy`` file, or a picture (PNG, JPEG, ...) where Pillow is installed (extra ``data``).

    Args:
        path: the file; NumPy's format is recognised by its first bytes, and never unpickled.
        channels: 1 or 3 to convert a picture to grayscale or RGB; None keeps grayscale as 1 and makes all
            else 3 channels. Transparency is ignored, and 16 bits are cut down to 8.
        size: (height, width) to scale a picture to (bilinear); None keeps its size. Arrays are neither
            converted nor scaled.

    Returns:
        float32 [N, C, H, W], N being 1 for pictures. Arrays may be [H, W], [C, H, W] or [N, C, H, W].
        Pictures, and arrays of uint8 and uint16, are divided by the greatest value of their type, to 0..1;
        other arrays keep their values.

    Raises:
        DatasetError: there is no such file, Pillow is missing, or ``channels`` is not 1 or 3.
        FormatError: the file is damaged, or holds something else than an image.
    """
    path = Path(path)
    if channels not in (None, 1, 3):
        raise DatasetError(f"load_image: channels is {channels}, wanted 1, 3 or None")
    try:
        with path.open("rb") as stream:
            is_npy = stream.read(len(_NPY_MAGIC)) == _NPY_MAGIC
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_npy:
        return _from_npy(path)
    if path.suffix == ".npy":
        raise FormatError(f"{path}: is not in NumPy's .npy format")
    return _from_picture(path, channels, size)


def _from_npy(path: Path) -> npt.NDArray[np.float32]:
    try:
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise FormatError(f"{path}: cannot be read as an array: {error}") from error
    if array.dtype.kind not in "buif":
        raise FormatError(f"{path}: elements are {array.dtype}, wanted numbers")
    if not 2 <= array.ndim <= 4 or array.size == 0:
        raise FormatError(
            f"{path}: shape is {array.shape}, wanted [H, W], [C, H, W] or [N, C, H, W], not empty"
        )
    return _scaled(array).reshape((1,) * (4 - array.ndim) + array.shape)


def _scaled(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    values = array.astype(np.float32)
    if array.dtype in (np.uint8, np.uint16):
        values /= np.float32(np.iinfo(array.dtype).max)
    return values


def _from_picture(path: Path, channels: int | None, size: tuple[int, int] | None) -> npt.NDArray[np.float32]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DatasetError(f"{path}: reading pictures needs Pillow: pip install 'gpunet[data]'") from error
    try:
        with Image.open(path) as picture:
            pixels = _pixels(picture, channels, size)
    except UnidentifiedImageError as error:
        raise FormatError(f"{path}: is neither a picture that Pillow knows nor a .npy file") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise FormatError(f"{path}: damaged or too large picture: {error}") from error
    if pixels.ndim == 2:
        return pixels[None, None]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]


def _pixels(
    picture: Image.Image, channels: int | None, size: tuple[int, int] | None
) -> npt.NDArray[np.float32]:
    """Float32 [H, W] or [H, W, 3] in 0..1."""
    from PIL import Image

    if picture.mode == "F":
        raise ValueError("pixels are floating point numbers; save them as .npy")
    if picture.mode.startswith("I"):
        # Pillow's own conversion from 16 to 8 bits clips instead of scaling.
        upper = np.clip(np.asarray(picture.convert("I")) >> 8, 0, 255).astype(np.uint8)
        converted = Image.fromarray(upper)
    else:
        converted = picture.convert("L" if picture.mode in _GRAY_MODES else "RGB")
    if channels is not None:
        converted = converted.convert("L" if channels == 1 else "RGB")
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return _scaled(np.asarray(converted))

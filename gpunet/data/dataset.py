"""Data sets by name or folder: images, labels and their split into training and test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpunet.data.digits import load_digits
from gpunet.data.errors import DatasetError
from gpunet.data.idx import load_idx
from gpunet.errors import FormatError

_PREFIXES = ("train", "t10k")
_KINDS = {"images": "idx3-ubyte", "labels": "idx1-ubyte"}
_HELD_OUT_FRACTION = 10

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Dataset:
    """Images with their classes.

    Attributes:
        train_images: float32 [N, C, H, W] in 0..1.
        train_labels: int32 [N], each in 0..classes - 1.
        test_images: float32 [M, C, H, W], held out.
        test_labels: int32 [M].
        classes: number of classes.
        name: "digits", or the folder's name.
    """

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    name: str


def load_dataset(name_or_dir: str | os.PathLike[str]) -> Dataset:
    """The data set "digits" that comes with the package, or a folder with MNIST's IDX files.

    The folder holds ``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte`` for training and the same
    with ``t10k`` for testing, each plain or ``.gz``, with ``-idx`` or ``.idx``. Where only one of the two
    pairs exists, its last tenth is held out for testing: the 10,000 images of MNIST's ``t10k`` become 9,000
    and 1,000. Pixels 0 to 255 are divided by 255.

    Raises:
        DatasetError: there is no such name or folder, or files are missing in it.
        FormatError: a file is malformed, or images and labels do not fit together.
    """
    if os.fspath(name_or_dir) == "digits":
        return Dataset(*load_digits("train"), *load_digits("test"), classes=10, name="digits")
    folder = Path(name_or_dir)
    if not folder.is_dir():
        raise DatasetError(
            f"no data set {os.fspath(name_or_dir)!r}: wanted 'digits' or a folder with MNIST's IDX files"
        )
    train, test = (_load_pair(folder, prefix) for prefix in _PREFIXES)
    only = train or test
    if only is None:
        wanted = ", ".join(_spellings(prefix, kind)[0] for prefix in _PREFIXES for kind in _KINDS)
        raise DatasetError(
            f"no IDX files in folder {folder}: looked for {wanted}, also with .gz, and with .idx for -idx"
        )
    if train is None or test is None:
        train, test = _hold_out(folder, only)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise FormatError(
            f"{folder}: training images have shape {train[0].shape[1:]}, test images {test[0].shape[1:]} "
            "(channels, height, width)"
        )
    classes = int(max(train[1].max(), test[1].max())) + 1
    return Dataset(*train, *test, classes=classes, name=folder.resolve().name)


def _spellings(prefix: str, kind: str) -> list[str]:
    """The file names that are looked for, in this order."""
    stems = [f"{prefix}-{kind}{separator}{_KINDS[kind]}" for separator in "-."]
    return [stem + suffix for stem in stems for suffix in ("", ".gz")]


def _load_pair(folder: Path, prefix: str) -> tuple[Images, Labels] | None:
    """The images and labels of one part; None where the folder has neither file."""
    found: dict[str, Path] = {}
    for kind in _KINDS:
        for spelling in _spellings(prefix, kind):
            if (folder / spelling).is_file():
                found[kind] = folder / spelling
                break
    if not found:
        return None
    for kind in _KINDS:
        if kind not in found:
            raise DatasetError(
                f"folder {folder} has {next(iter(found.values())).name} but no {prefix} {kind}: "
                f"looked for {', '.join(_spellings(prefix, kind))}"
            )
    images, labels = load_idx(found["images"]), load_idx(found["labels"])
    _check(found["images"], images, np.uint8, 3, "images")
    _check(found["labels"], labels, np.uint8, 1, "labels")
    if len(images) != len(labels):
        raise FormatError(f"{folder}: {len(images)} {prefix} images but {len(labels)} {prefix} labels")
    # Divided in place: the float32 images of a large set should exist once only.
    scaled = images[:, None].astype(np.float32)
    scaled /= np.float32(255)
    return scaled, labels.astype(np.int32)


def _check(path: Path, array: npt.NDArray[Any], dtype: type[np.generic], rank: int, what: str) -> None:
    if array.dtype != dtype or array.ndim != rank or array.size == 0:
        raise FormatError(
            f"{path}: {what} are {array.dtype} of shape {array.shape}, wanted {np.dtype(dtype)} "
            f"of {rank} dimension(s), not empty"
        )


def _hold_out(
    folder: Path, pair: tuple[Images, Labels]
) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    images, labels = pair
    held_out = len(labels) // _HELD_OUT_FRACTION
    if held_out == 0:
        raise FormatError(
            f"{folder}: the only pair of files has {len(labels)} images; at least {_HELD_OUT_FRACTION} are "
            "needed to hold a tenth out for testing"
        )
    edge = len(labels) - held_out
    return (images[:edge], labels[:edge]), (images[edge:], labels[edge:])

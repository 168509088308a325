"""The UCI optical digits: 1,797 images of 8x8 pixels that come with the package (``DIGITS.md``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpunet.data.errors import DatasetError

_FILE = Path(__file__).with_name("digits.npz")
_HELD_OUT_EVERY = 6


def load_digits(split: str = "train") -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """One part of the digits, in the order of the source.

    The split is fixed and stratified: among the images of each class, counted in the order of the source,
    every sixth one (the 6th, the 12th, ...) is held out for testing.

    Args:
        split: "train" or "test".

    Returns:
        Images, float32 [N, 1, 8, 8] in 0..1 (the stored 0 to 16 divided by 16), and labels, int32 [N] in
        0..9.

    Raises:
        DatasetError: ``split`` is neither.
    """
    if split not in ("train", "test"):
        raise DatasetError(f"load_digits: unknown split {split!r}, wanted 'train' or 'test'")
    with np.load(_FILE, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for digit in range(10):
        held_out[np.flatnonzero(labels == digit)[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]] = True
    chosen = held_out if split == "test" else ~held_out
    return images[chosen][:, None].astype(np.float32) / np.float32(16), labels[chosen].astype(np.int32)

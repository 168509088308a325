"""Makes ``digits.npz`` from ``digits.csv.gz`` of scikit-learn (``sklearn/datasets/data`` in its wheel).

Usage: ``python -m gpunet.data.make_digits digits.csv.gz digits.npz``. A row of the source holds the 64
    pixels of
an image, row by row, and its label; the order of the rows is kept, because the split of `load_digits` goes
by it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def make_digits(source: Path, target: Path) -> None:
    """Writes ``images`` (uint8 [N, 8, 8], values 0 to 16) and ``labels`` (uint8 [N], 0 to 9) to ``target``.

    Raises:
        ValueError: ``source`` does not hold rows of 64 pixels and a label in these ranges.
    """
    rows = np.loadtxt(source, delimiter=",", ndmin=2)
    if rows.shape[1] != 65:
        raise ValueError(f"{source}: rows have {rows.shape[1]} columns, wanted 64 pixels and a label")
    pixels, labels = rows[:, :64], rows[:, 64]
    for what, values, top in (("pixels", pixels, 16), ("labels", labels, 9)):
        if values.min() < 0 or values.max() > top or (values != np.floor(values)).any():
            raise ValueError(f"{source}: {what} are not whole numbers from 0 to {top}")
    np.savez_compressed(
        target, images=pixels.astype(np.uint8).reshape(-1, 8, 8), labels=labels.astype(np.uint8)
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m gpunet.data.make_digits digits.csv.gz digits.npz")
    make_digits(Path(sys.argv[1]), Path(sys.argv[2]))

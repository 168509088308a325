"""Random shifts and mirrored images that depend on the seed, the sample and the epoch alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpunet import philox
from gpunet.data.errors import DatasetError

_OPERATOR = philox.operator_id("gpunet.data", "augment")
_WORDS_EACH = 4


class ShiftFlip:
    """Shifts each image by up to ``max_shift`` pixels in both directions and mirrors half of them.

    Pixels that come in from outside are 0. Sample ``i`` in epoch ``e`` uses block ``i`` of the Philox draw
    (seed, ``operator_id("gpunet.data", "augment")``, ``e``): word 0 gives the shift down, word 1 the shift
    right, each as ``floor(word * (2 * max_shift + 1) / 2**32) - max_shift``, and word 2 below 2**31 mirrors
    left and right. So the order and the size of the batches do not matter, and a resumed run sees the same
    images.
    """

    def __init__(self, *, seed: int, max_shift: int = 4, flip: bool = True) -> None:
        """Makes the augmentation.

        Raises:
            DatasetError: ``max_shift`` is negative.
        """
        if max_shift < 0:
            raise DatasetError(f"ShiftFlip: max_shift is {max_shift}, wanted 0 or more")
        self._seed = seed
        self._max_shift = max_shift
        self._flip = flip
        self._table_epoch = -1
        self._table = np.empty((0, _WORDS_EACH), dtype=np.uint32)

    def __call__(
        self, images: npt.NDArray[np.float32], indices: npt.NDArray[np.int64], epoch: int
    ) -> npt.NDArray[np.float32]:
        """Changed copies of ``images`` [N, C, H, W], whose positions in the data set are ``indices`` [N]."""
        words = self._words(epoch, int(indices.max(initial=-1)) + 1)[indices].astype(np.uint64)
        places = 2 * self._max_shift + 1
        # A window that starts `max_shift - shift` into the padded image shows it shifted by `shift`.
        down, right = (
            places - 1 - (words[:, i] * np.uint64(places) >> np.uint64(32)).astype(np.int64) for i in (0, 1)
        )
        border = (self._max_shift, self._max_shift)
        padded = np.pad(images, ((0, 0), (0, 0), border, border))
        windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
        result: npt.NDArray[np.float32] = windows[np.arange(len(images)), :, down, right]
        if self._flip:
            mirrored = words[:, 2] < np.uint64(1 << 31)
            result[mirrored] = result[mirrored, :, :, ::-1]
        return result

    def _words(self, epoch: int, samples: int) -> npt.NDArray[np.uint32]:
        """The words of at least ``samples`` samples of an epoch; made once for many batches."""
        if epoch != self._table_epoch or samples > len(self._table):
            # A power of two, so that growing indices within an epoch make few new tables.
            size = max(len(self._table), 1 << max(samples - 1, 0).bit_length())
            self._table = philox.raw(self._seed, _OPERATOR, epoch, size * _WORDS_EACH).reshape(
                size, _WORDS_EACH
            )
            self._table_epoch = epoch
        return self._table

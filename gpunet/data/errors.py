"""The exception of data sets, images and batches."""

from __future__ import annotations

from gpunet.errors import GpunetError


class DatasetError(GpunetError, ValueError):
    """A data set or an image is missing, cannot be read here, or cannot be used as asked."""

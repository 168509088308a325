"""Data for training and prediction: data sets, images, batches in a reproducible order."""

from gpunet.data.augment import ShiftFlip
from gpunet.data.dataset import Dataset, load_dataset
from gpunet.data.digits import load_digits
from gpunet.data.errors import DatasetError
from gpunet.data.idx import load_idx
from gpunet.data.image import load_image
from gpunet.data.prefetch import Prefetcher
from gpunet.data.sampler import Batches

__all__ = [
    "Batches",
    "Dataset",
    "DatasetError",
    "Prefetcher",
    "ShiftFlip",
    "load_dataset",
    "load_digits",
    "load_idx",
    "load_image",
]

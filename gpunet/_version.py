"""The version: read by the build and by the package, written nowhere else."""

__version__ = "0.1.0"

"""The exceptions that gpunet raises on purpose.

Every message says what went wrong, where, what was found and what was wanted. Functions that do not know
where they are called from (shape rules, kernels) raise with the bare finding; the compiler and the engines
add the operator and the net with :meth:`GpunetError.locate`.
"""

from __future__ import annotations

from typing import TypeVar

Error = TypeVar("Error", bound="GpunetError")


class GpunetError(Exception):
    """Base of all errors of this package."""

    #: Where it happened ("[Conv] op 12 'res2a' in net 'resnet50'"), once known.
    location: str = ""

    def locate(self: Error, where: str) -> Error:
        """Puts ``where`` in front of the message, unless an inner frame already did, and returns the error
        itself.
        """
        if not self.location:
            self.location = where
            self.args = (f"{where}: {self}", *self.args[1:])
        return self


class FormatError(GpunetError, ValueError):
    """Bytes or text from outside (a file, a message) are malformed, truncated or larger than allowed."""


class CheckpointError(FormatError):
    """A checkpoint is damaged, incomplete, or belongs to something else."""


class SchemaError(GpunetError, ValueError):
    """An operator definition does not fit its schema: unknown type, number of inputs, forbidden in-place
    use.
    """


class ArgumentError(SchemaError):
    """An operator argument has the wrong type or a value that makes no sense."""


class ShapeError(GpunetError, ValueError):
    """The shapes of the inputs of an operator do not fit together."""


class DataTypeError(GpunetError, TypeError):
    """A blob holds another element type, or another kind of object, than is wanted."""


class BlobError(GpunetError, LookupError):
    """A blob does not exist, or holds nothing yet."""


class NetError(GpunetError, ValueError):
    """A net is not well formed: use before definition, a cycle, a name that is taken."""


class GradientError(GpunetError, ValueError):
    """A gradient was asked for where there is none, or of a blob that was overwritten."""


class DeviceError(GpunetError, RuntimeError):
    """A device does not exist here, or has no kernel for an operator."""


class AllocationError(GpunetError, MemoryError):
    """There is not as much memory as is wanted."""


class KernelError(GpunetError, RuntimeError):
    """A kernel refused its data, or failed, while a net ran (a label out of range, say)."""

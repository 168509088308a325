"""What a gradient function of a schema works with: names in, operator definitions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from gpunet.arguments import Arguments
from gpunet.errors import GradientError
from gpunet.operator import Operator
from gpunet.proto import OperatorDef


class GradientSlice(NamedTuple):
    """A sparse gradient: blob ``values`` holds rows, blob ``indices`` the rows of the parameter that they
    belong to.
    """

    indices: str
    values: str


#: Name of a dense gradient blob, a sparse pair, or nothing.
Gradient: TypeAlias = str | GradientSlice | None


def gradient_name(blob: str) -> str:
    """The name of the gradient of ``blob``, after Caffe2's rule."""
    return f"{blob}_grad"


class GradientBuilder:
    """Collects the gradient of one operator, graph to graph.

    A gradient function reads the names of the forward operator's blobs and of the gradients of its outputs,
    and returns operator definitions. Asking for :meth:`input_grad` declares that input's gradient as produced
    (densely). The forward operator's arguments, engine and device are added to each returned definition
    afterwards, unless :attr:`copy_arguments` is turned off.
    """

    def __init__(self, op: Operator, output_grads: Sequence[Gradient]) -> None:
        self.op = op
        self.args: Arguments = op.args
        self.copy_arguments = True
        self.input_grads: list[Gradient] = [None] * len(op.inputs)
        self._output_grads = list(output_grads)

    @property
    def num_inputs(self) -> int:
        """Number of inputs of the forward operator."""
        return len(self.op.inputs)

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the forward operator."""
        return len(self.op.outputs)

    def input(self, index: int) -> str:
        """Name of forward input ``index``."""
        return self.op.inputs[index]

    def output(self, index: int) -> str:
        """Name of forward output ``index``."""
        return self.op.outputs[index]

    def output_grad(self, index: int) -> str:
        """Name of the dense gradient of forward output ``index``; raises :class:`GradientError` if there is
        none.
        """
        found = self._output_grads[index]
        if not isinstance(found, str):
            kind = "is sparse, wanted a dense one" if isinstance(found, GradientSlice) else "is not provided"
            raise GradientError(f"the gradient of output {self.output(index)!r} {kind}")
        return found

    def output_grad_slice(self, index: int) -> GradientSlice:
        """The sparse gradient of forward output ``index``; raises :class:`GradientError` if it is dense or
        missing.
        """
        found = self._output_grads[index]
        if not isinstance(found, GradientSlice):
            raise GradientError(f"the gradient of output {self.output(index)!r} is not sparse")
        return found

    def has_output_grad(self, index: int) -> bool:
        """Whether a gradient of forward output ``index`` is provided, dense or sparse."""
        return index < len(self._output_grads) and self._output_grads[index] is not None

    def is_sparse(self, index: int) -> bool:
        """Whether the gradient of forward output ``index`` is a sparse pair."""
        return index < len(self._output_grads) and isinstance(self._output_grads[index], GradientSlice)

    def input_grad(self, index: int) -> str:
        """The default name of the dense gradient of forward input ``index``, which is declared as
        produced.
        """
        return self.set_dense(index, gradient_name(self.input(index)))

    def set_dense(self, index: int, name: str) -> str:
        """Declares the blob ``name`` as the dense gradient of forward input ``index``; returns the name."""
        self.input_grads[index] = name
        return name

    def set_sparse(self, index: int, indices: str, values: str) -> GradientSlice:
        """Declares a sparse gradient of forward input ``index``."""
        result = GradientSlice(indices, values)
        self.input_grads[index] = result
        return result

    def input_grad_slice(self, index: int) -> GradientSlice:
        """The default names (``X_grad_indices``, ``X_grad_values``) of a sparse gradient of input ``index``,
        declared as produced.
        """
        name = gradient_name(self.input(index))
        return self.set_sparse(index, f"{name}_indices", f"{name}_values")

    def make(self, type: str, inputs: Sequence[str], outputs: Sequence[str], **args: Any) -> OperatorDef:
        """An operator definition with these blobs and arguments."""
        from gpunet.definitions import make_operator

        return make_operator(type, inputs, outputs, **args)

    def single(
        self, type: str, inputs: Sequence[str], outputs: Sequence[str], **args: Any
    ) -> list[OperatorDef]:
        """A list with one definition: what most gradient functions return."""
        return [self.make(type, inputs, outputs, **args)]

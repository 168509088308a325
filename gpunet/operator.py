"""A resolved operator: a definition together with its schema and parsed arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpunet import schema as schemas
from gpunet.arguments import Arguments, parse_arguments
from gpunet.errors import GpunetError, SchemaError, ShapeError
from gpunet.specs import MAX_RANK, BlobSpec, TensorSpec, is_representable

if TYPE_CHECKING:
    from gpunet.proto import OperatorDef


class Operator:
    """One operator of a net, resolved against its schema. Kernels, shape rules and passes read it; nothing
    changes it.

    Raises :class:`SchemaError` (an unknown type, a wrong number of inputs) or :class:`ArgumentError` when
    made.
    """

    __slots__ = ("args", "definition", "index", "inputs", "net_name", "outputs", "schema", "type")

    def __init__(self, definition: OperatorDef, net_name: str = "", index: int = 0) -> None:
        self.definition = definition
        self.type: str = definition.type
        self.inputs: tuple[str, ...] = tuple(definition.input)
        self.outputs: tuple[str, ...] = tuple(definition.output)
        self.net_name = net_name
        self.index = index
        try:
            self.schema = schemas.lookup(self.type)
            self.args: Arguments = parse_arguments(definition, self.schema.arg_table)
            self.schema.validate(self)
        except GpunetError as error:
            raise error.locate(self.where) from None

    @property
    def where(self) -> str:
        """``[Conv] op 12 'res2a' in net 'resnet50'``: how messages name this operator."""
        name = self.definition.name or (self.outputs[0] if self.outputs else "")
        place = f" in net {self.net_name!r}" if self.net_name else ""
        number = f" {self.index}" if self.net_name else ""
        return f"[{self.type}] op{number} {name!r}{place}"

    def error(self, message: str) -> SchemaError:
        """An error of this operator's declaration, located at this operator."""
        return SchemaError(message).locate(self.where)

    @property
    def dynamic(self) -> bool:
        """Whether the shapes of the outputs depend on data."""
        return self.schema.is_dynamic(self)

    def infer(self, specs: Sequence[BlobSpec | None]) -> list[BlobSpec | None]:
        """Specs of the outputs, one for each output of the definition; ``None`` where they depend on data.

        Raises DataTypeError, ShapeError or ArgumentError, located at this operator.
        """
        try:
            self.schema.check_types(self, specs)
            if any(s is None for s in specs):
                return [None] * len(self.outputs)
            found = list(self.schema.infer(self, specs))
            if len(found) < len(self.outputs):
                raise SchemaError(f"has {len(self.outputs)} outputs, wanted at most {len(found)} here")
            for output, after in enumerate(found[: len(self.outputs)]):
                self._check_size(output, after)
            for output, i in (
                (o, self.inputs.index(n)) for o, n in enumerate(self.outputs) if n in self.inputs
            ):
                self._check_inplace(i, output, specs[i], found[output])
            return [_forget(s, specs) for s in found[: len(self.outputs)]]
        except GpunetError as error:
            raise error.locate(self.where) from None

    def _check_size(self, o: int, after: BlobSpec | None) -> None:
        if isinstance(after, TensorSpec) and not is_representable(after.shape, after.dtype):
            raise ShapeError(
                f"output {self.schema.output_label(o)} would be {after} ({after.rank} dimensions), wanted "
                f"at most {MAX_RANK} dimensions and less than 2^63 bytes"
            )

    def _check_inplace(self, i: int, o: int, before: BlobSpec | None, after: BlobSpec | None) -> None:
        if isinstance(before, TensorSpec) and isinstance(after, TensorSpec) and before.nbytes != after.nbytes:
            raise ShapeError(
                f"output {self.schema.output_label(o)} ({after}) cannot be written in place of input "
                f"{self.schema.input_label(i)} ({before}), wanted equal sizes or another output name"
            )

    def flops(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Floating-point operations of one run on tensors of these specs."""
        return 0 if self.schema.flops is None else int(self.schema.flops(self, inputs, outputs))

    def __repr__(self) -> str:
        return f"Operator({self.type}: {', '.join(self.inputs)} -> {', '.join(self.outputs)})"


def _forget(found: BlobSpec | None, inputs: Sequence[BlobSpec | None]) -> BlobSpec | None:
    """A rule that passes the spec of an input on speaks of its shape and type, not of its elements."""
    if isinstance(found, TensorSpec) and found.known is not None and any(found is s for s in inputs):
        return TensorSpec(found.shape, found.dtype)
    return found

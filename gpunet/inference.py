"""Shape and type inference over a whole net, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpunet.dtypes import DTypeLike, as_dtype
from gpunet.errors import BlobError, ShapeError
from gpunet.net import NetLike, as_net_def, check_source, check_types
from gpunet.operator import Operator
from gpunet.specs import BlobSpec, Shape, TensorSpec


def infer(net: NetLike, blobs: Mapping[str, tuple[Shape, DTypeLike]]) -> dict[str, tuple[Shape, np.dtype]]:
    """Shapes and types of all tensors of a net.

    Args:
        net: a ``NetDef``, its bytes, or a :class:`gpunet.Net`.
        blobs: shape and type of each blob that the net reads and does not make.

    Returns:
        Shape and type of the blobs given and of those that the net makes. Blobs whose shape depends on data,
        and all that follow from them, are left out, as are opaque ones.

    Raises:
        NetError: the operators form a cycle, or are in no order of use.
        BlobError: the net reads a blob that is neither given nor made before.
        SchemaError, ArgumentError, ShapeError, DataTypeError: an operator does not fit, located at the
            operator.
    """
    specs: dict[str, BlobSpec | None] = {name: _spec(name, known) for name, known in blobs.items()}
    definition = as_net_def(net)
    check_types(definition)
    for index, op_def in enumerate(definition.op):
        for name in op_def.input:
            if name not in specs:
                check_source(definition, index, name)
        infer_operator(Operator(op_def, definition.name, index), specs)
    return {name: (s.shape, s.dtype) for name, s in specs.items() if isinstance(s, TensorSpec)}


def infer_operator(op: Operator, specs: dict[str, BlobSpec | None]) -> list[BlobSpec | None]:
    """Infers one operator from ``specs`` and puts its outputs there."""
    missing = [name for name in op.inputs if name not in specs]
    if missing:
        raise BlobError(f"input {missing[0]!r} is neither given nor made by an earlier operator").locate(
            op.where
        )
    outputs = op.infer([specs[name] for name in op.inputs])
    specs.update(zip(op.outputs, outputs, strict=False))
    return outputs


def _spec(name: str, known: Any) -> TensorSpec:
    try:
        shape, dtype = known
        dims = tuple(int(n) for n in shape)
    except (TypeError, ValueError):
        raise ShapeError(f"blob {name!r} is given as {known!r}, wanted (shape, element type)") from None
    if any(n < 0 for n in dims):
        raise ShapeError(f"blob {name!r} is given with shape {dims}, wanted no negative dimension")
    return TensorSpec(dims, as_dtype(dtype))

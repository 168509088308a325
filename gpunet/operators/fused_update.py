"""Parameter updates that add weight decay to the gradient on the way: what the pass ``updates`` makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpunet.operator import Operator
from gpunet.operators import optimizer as _plain_updates  # noqa: F401 (registers what is fused here)
from gpunet.operators.learning_rate import REALS
from gpunet.rules import want_same_type, want_size
from gpunet.schema import Input, lookup, register
from gpunet.specs import BlobSpec, TensorSpec

#: Updates that have a fused form: its type, and which inputs are gradient and parameter.
FUSED_UPDATES: Final = {
    "MomentumSGDUpdate": ("FusedMomentumSGDUpdate", 0, 3),
    "Adam": ("FusedAdam", 3, 0),
}
#: The updates by the types of their fused forms.
PLAIN_UPDATES: Final = {fused: plain for plain, (fused, _, _) in FUSED_UPDATES.items()}


def _register(plain: str) -> None:
    fused, _, parameter = FUSED_UPDATES[plain]
    declared = lookup(plain)
    count = len(declared.inputs)

    def infer(op: Operator, inputs: Sequence[TensorSpec]) -> Sequence[BlobSpec | None]:
        want_same_type(op, inputs, parameter, count, count + 1)
        for index in (count, count + 1):
            want_size(op, inputs, index, 1)
        return declared.infer(op, inputs[:count])

    def flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        update = 0 if declared.flops is None else declared.flops(op, inputs, outputs)
        return 3 * inputs[parameter].size + update

    register(
        fused,
        inputs=[
            *declared.inputs,
            Input("gradient_weight", "factor of the gradient: one element", REALS),
            Input("param_weight", "factor of the parameter: one element", REALS),
        ],
        outputs=list(declared.outputs),
        args=list(declared.args),
        inplace=list(declared.inplace),
        check=declared.check,
        infer=infer,
        flops=flops,
        doc=f"{plain} with ``gradient_weight grad + param_weight param`` as the gradient: a WeightedSum and "
        "the update in one pass. The pass updates makes it; nets do not contain it.",
    )


for _plain in FUSED_UPDATES:
    _register(_plain)

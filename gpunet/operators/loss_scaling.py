"""Loss scaling for training in float16: gradients are scaled back and checked, bad steps are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import Float, Int
from gpunet.errors import ArgumentError, SchemaError
from gpunet.operator import Operator
from gpunet.rules import flops_per_output, want_size
from gpunet.schema import ALL_INPLACE, FLOATS, Input, Output, Types, register
from gpunet.specs import TensorSpec, spec

_SCALE: Final[Types] = frozenset([spec((), "float32").dtype])
_COUNT: Final[Types] = frozenset([spec((), "int64").dtype])
_FLAG: Final[Types] = frozenset([spec((), "int32").dtype])


def _check_unscale(op: Operator) -> None:
    if op.outputs[1:] != op.inputs[1:]:
        raise SchemaError(f"outputs {list(op.outputs[1:])} must be in place of inputs {list(op.inputs[1:])}")


def _infer_unscale(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_size(op, inputs, 0, 1)
    return [spec((1,), "int32"), *inputs[1:]]


register(
    "UnscaleGradients",
    inputs=[
        Input("scale", "what the loss was multiplied by, one element", _SCALE),
        Input("gradient", "gradients of the scaled loss", FLOATS, variadic=True),
    ],
    outputs=[
        Output("finite", "int32, one element: 1 if all elements of all gradients are finite, else 0"),
        Output("gradient", "the gradients over scale, in place", variadic=True),
    ],
    inplace=ALL_INPLACE,
    infer=_infer_unscale,
    check=_check_unscale,
    flops=flops_per_output(),
    doc="Divides gradients by the scale of the loss, in place, and tells whether all of them are finite.",
)


def _infer_update(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    for index in range(4):
        want_size(op, inputs, index, 1)
    return [inputs[0], inputs[1], inputs[2]]


def _check_update(op: Operator) -> None:
    args = op.args
    if not args.growth > 1 or not 0 < args.backoff < 1 or args.interval < 1:
        raise ArgumentError(
            f"growth is {args.growth}, backoff {args.backoff}, interval {args.interval}, "
            "wanted more than 1, between 0 and 1, and at least 1"
        )


register(
    "UpdateLossScale",
    inputs=[
        Input("scale", "the scale of the loss, one element", _SCALE),
        Input("good", "steps since it was last changed, one element", _COUNT),
        Input("skipped", "steps with gradients that were not finite, one element", _COUNT),
        Input("finite", "from UnscaleGradients", _FLAG),
    ],
    outputs=[
        Output("scale", "the new scale"),
        Output("good", "the new number"),
        Output("skipped", "the new number"),
    ],
    enforce_inplace=[(0, 0), (1, 1), (2, 2)],
    args=[
        Float("growth", 2.0, "factor of the scale after `interval` good steps"),
        Float("backoff", 0.5, "factor of the scale after a bad step"),
        Int("interval", 2000, "good steps before the scale grows"),
        Float("maximum", 2.0**24, "upper bound of the scale"),
    ],
    infer=_infer_update,
    check=_check_update,
    host=True,
    doc="Dynamic loss scaling: a bad step lowers the scale at once, a run of good ones raises it. Source: "
    "P. Micikevicius et al., Mixed Precision Training, ICLR 2018.",
)


def _infer_stop(op: Operator, inputs: Sequence[Any]) -> list[Any]:
    want_size(op, inputs, 0, 1)
    return []


register(
    "StopUnless",
    inputs=[Input("condition", "one element", _FLAG)],
    infer=_infer_stop,
    dynamic=True,
    host=True,
    doc="Ends the run of the net here where the condition is 0: the operators behind it are not run.",
)

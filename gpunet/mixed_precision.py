"""Training in a half type, float16 or bfloat16: a pass over a model that has no gradients yet.

Convolutions and matrix products, and what follows them elementwise or by windows, run in the half type;
losses, softmax, and batch norm with its statistics stay in float32. Parameters stay float32 (master weights)
and are rounded in each step, so that gradients and updates are float32 too. With float16 the loss is scaled
before the backward pass, by a factor that adapts: a step whose gradients overflow is skipped and reported.
Source: P. Micikevicius et al., Mixed Precision Training, ICLR 2018. bfloat16 has the range of float32, so its
gradients need no scale (D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from gpunet.definitions import make_operator
from gpunet.dtypes import DTypeLike, as_dtype, is_half
from gpunet.errors import ArgumentError, GradientError
from gpunet.gradient_maker import Gradient
from gpunet.model import Model
from gpunet.proto import OperatorDef
from gpunet.specs import TensorSpec

#: Operators that are worth a half type.
HALF: Final = frozenset(
    ["Conv", "Conv1D", "Conv2D", "Conv3D", "ConvTranspose", "FC", "FCTransposed", "MatMul", "BatchMatMul"]
)
#: Operators that run in the half type where all their floating-point inputs are.
FOLLOW: Final = frozenset(
    [
        "AveragePool",
        "Concat",
        "Copy",
        "Dropout",
        "ExpandDims",
        "Flatten",
        "FlattenToVec",
        "MaxPool",
        "Relu",
        "Reshape",
        "Squeeze",
        "StopGradient",
        "Sum",
        "Transpose",
    ]
)

SCALE: Final = "loss_scale"
GOOD: Final = "loss_scale_good_steps"
SKIPPED: Final = "loss_scale_skipped_steps"
FINITE: Final = "gradients_finite"


def to_half(model: Model, dtype: DTypeLike = "float16") -> None:
    """Rewrites the forward pass of ``model`` for a half type, in place.

    Casts are operators of the net (FloatToHalf and HalfToFloat, or Cast for bfloat16), one for each blob and
    direction, so that gradients pass through them. Blobs keep their names; those that change their type are
    those that operators of :data:`HALF` and :data:`FOLLOW` make.

    Args:
        model: has no gradients yet.
        dtype: float16 or bfloat16.

    Raises:
        ArgumentError: another type.
        DataTypeError: bfloat16 without the package ml_dtypes.
        GradientError: the model has its gradients already.
    """
    half = as_dtype(dtype)
    if not is_half(half):
        raise ArgumentError(f"dtype is {half}, wanted float16 or bfloat16")
    model.rewrite_forward(_Converter(model.specs, half).convert)


class _Converter:
    """Converts operators one by one, in order, and knows the type of each blob meanwhile."""

    def __init__(self, specs: Mapping[str, object], dtype: np.dtype) -> None:
        self._dtype = dtype
        self._floats = {n for n, s in specs.items() if isinstance(s, TensorSpec) and s.dtype == np.float32}
        self._half: set[str] = set()
        self._casts: dict[tuple[str, bool], str] = {}

    def convert(self, op: OperatorDef) -> list[OperatorDef]:
        """The operator with the casts that it needs in front."""
        inputs = [name for name in op.input if name in self._floats]
        half = op.type in HALF or (
            op.type in FOLLOW and bool(inputs) and all(n in self._half for n in inputs)
        )
        made: list[OperatorDef] = []
        result = OperatorDef()
        result.CopyFrom(op)
        for index, name in enumerate(op.input):
            if name in self._floats and (name in self._half) != half:
                result.input[index] = self._cast(name, op, made, half=half)
        for name in op.output:
            self._casts = {key: cast for key, cast in self._casts.items() if key[0] != name}
            self._half.discard(name)
            # Masks and the like are no floats; what a float operator makes in float32 is.
            if half and name in self._floats:
                self._half.add(name)
        return [*made, result]

    def _cast(self, name: str, op: OperatorDef, made: list[OperatorDef], *, half: bool) -> str:
        key = (name, half)
        if key not in self._casts:
            self._casts[key] = f"{name}_{'half' if half else 'float'}"
            cast = self._cast_operator(name, self._casts[key], half=half)
            if op.HasField("device_option"):
                cast.device_option.CopyFrom(op.device_option)
            made.append(cast)
        return self._casts[key]

    def _cast_operator(self, source: str, target: str, *, half: bool) -> OperatorDef:
        if self._dtype == np.float16:
            return make_operator("FloatToHalf" if half else "HalfToFloat", [source], [target])
        single = np.dtype(np.float32)
        to, back = (self._dtype, single) if half else (single, self._dtype)
        return make_operator("Cast", [source], [target], to=to, from_type=back)


def add_scaled_gradients(
    model: Model, loss: str, *, initial_scale: float = 2.0**15, growth_interval: int = 2000
) -> dict[str, Gradient]:
    """Adds gradients of a scaled loss, scales them back, and skips what follows in the net where they are not
    finite.

    Call it in place of :meth:`Model.add_gradients`, before an optimizer is applied. The scale, and how many
    steps were skipped so far, are in the blobs :data:`SCALE` and :data:`SKIPPED`, which checkpoints hold.

    Args:
        model: its forward pass may have been converted by :func:`to_half`.
        loss: a scalar blob.
        initial_scale: the first factor of the loss, more than 0.
        growth_interval: good steps in a row before the scale doubles.

    Returns:
        What :meth:`Model.add_gradients` does.

    Raises:
        ArgumentError: a number that makes no sense.
        GradientError: a parameter has a sparse gradient.
    """
    if not initial_scale > 0:
        raise ArgumentError(f"initial_scale is {initial_scale!r}, wanted more than 0")
    model.add_state(SCALE, shape=(), value=initial_scale)
    for name in (GOOD, SKIPPED):
        model.add_state(name, shape=(1,), value=0, dtype="int64")
    gradients = model.add_gradients({loss: SCALE})
    names = []
    for parameter in model.params:
        if parameter.gradient is not None and not isinstance(parameter.gradient, str):
            raise GradientError(
                f"the gradient of {parameter.name!r} is sparse, wanted dense ones with a scaled loss"
            )
        if parameter.gradient is not None and parameter.gradient not in names:
            names.append(parameter.gradient)
    model.net.add("UnscaleGradients", [SCALE, *names], [FINITE, *names])
    state = [SCALE, GOOD, SKIPPED]
    model.net.add("UpdateLossScale", [*state, FINITE], state, interval=growth_interval)
    model.net.add("StopUnless", [FINITE], [])
    return gradients

"""FusedConv and FusedFC: a convolution or a fully connected layer, and what is done to its output.

The pass ``epilogues`` puts them in the place of a convolution (or a product) and the operators that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpunet.arguments import REQUIRED, Arguments, Str
from gpunet.errors import ArgumentError, SchemaError
from gpunet.operator import Operator
from gpunet.operators.convolution import GROUP, check_group, infer_forward, multiplications
from gpunet.operators.matmul import FC_ARGS, fc_flops, infer_fc
from gpunet.operators.window import window_arguments
from gpunet.rules import want_same_type, want_shape
from gpunet.schema import FLOATS, Input, Output, Places, register
from gpunet.specs import TensorSpec

#: Words that end an epilogue.
ACTIVATIONS: Final = ("relu", "sigmoid")
#: All words of an epilogue, in the order in which they are applied.
WORDS: Final = ("bias", "add", *ACTIVATIONS)
#: Words that read an input.
_OPERANDS: Final = ("bias", "add")


def words_of(args: Arguments) -> tuple[str, ...]:
    """The words of the argument ``epilogue``, in order."""
    return tuple(args.epilogue.split("+"))


def operand(args: Arguments, inputs: Sequence[Any], word: str) -> Any | None:
    """The input (or spec) of a :data:`word <WORDS>` of the epilogue; ``None`` where it is not in it."""
    words = [w for w in words_of(args) if w in _OPERANDS]
    return inputs[2 + words.index(word)] if word in words else None


def activation(args: Arguments) -> str:
    """``relu``, ``sigmoid``, or nothing."""
    last = words_of(args)[-1]
    return last if last in ACTIVATIONS else ""


def _check(op: Operator) -> None:
    words = words_of(op.args)
    places = [WORDS.index(w) if w in WORDS else -1 for w in words]
    if -1 in places or sorted(set(places)) != places or len(set(words) & set(ACTIVATIONS)) > 1:
        raise ArgumentError(
            f"argument 'epilogue' is {op.args.epilogue!r}, wanted some of {', '.join(WORDS)} in this order, "
            "joined by +, with one activation at most"
        )
    wanted = 2 + sum(w in _OPERANDS for w in words)
    if len(op.inputs) != wanted:
        raise SchemaError(f"has {len(op.inputs)} inputs, wanted {wanted} for epilogue {op.args.epilogue}")
    check_group(op)


def _infer(op: Operator, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    want_same_type(op, inputs)
    (y,) = infer_forward(op, inputs[:2])
    words = [w for w in words_of(op.args) if w in _OPERANDS]
    for index, word in enumerate(words, 2):
        shape = inputs[1].shape[:1] if word == "bias" else y.shape
        want_shape(
            op, inputs, index, shape, "one number an output channel" if word == "bias" else "that of Y"
        )
    return [y]


def _flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return multiplications(inputs[1], outputs[0]) + len(words_of(op.args)) * outputs[0].size


def _channels(op: Operator) -> Places:
    added = (len(op.inputs) - 1,) if "add" in words_of(op.args) else ()
    return (0, 1, *added), (0,)


register(
    "FusedConv",
    inputs=[
        Input("X", "images", FLOATS),
        Input("W", "filters", FLOATS),
        Input("operands", "what bias and add read, in this order", FLOATS, optional=True, variadic=True),
    ],
    outputs=[Output("Y", "filtered images after the epilogue")],
    args=[
        *window_arguments("filter"),
        GROUP,
        Str(
            "epilogue",
            REQUIRED,
            "what is done to the result, joined by +: bias (one number an output channel is added), add (a "
            "tensor of the shape of Y is), and relu or sigmoid, in this order",
        ),
    ],
    infer=_infer,
    flops=_flops,
    channels=_channels,
    check=_check,
    doc="A convolution as of Conv, and what follows it, without another pass over memory: ``Y = act(W * X "
    "+ b + R)``. The pass epilogues makes it; nets do not contain it.",
)


def _fc_flops(op: Operator, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return fc_flops(op, inputs, outputs) + outputs[0].size


for _type, _weights, _formula in (("FC", "N x K", "X W^T"), ("FCTransposed", "K x N", "X W")):
    register(
        f"Fused{_type}",
        inputs=[
            Input("X", "features, the dimensions before `axis` are rows: M x K", FLOATS),
            Input("W", f"weights: {_weights}", FLOATS),
            Input("b", "bias: N", FLOATS),
        ],
        outputs=[Output("Y", "the dimensions of X before `axis`, then N")],
        args=[*FC_ARGS, Str("epilogue", "relu", "what is done to the result", choices=("relu",))],
        infer=infer_fc,
        flops=_fc_flops,
        doc=f"A fully connected layer and the ReLU behind it, ``Y = max({_formula} + b, 0)``. The pass "
        "epilogues makes it; nets do not contain it.",
    )

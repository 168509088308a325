"""Activation functions: Relu, Sigmoid, Tanh."""

from __future__ import annotations

from gpunet.gradient_maker import GradientBuilder
from gpunet.proto import OperatorDef
from gpunet.rules import flops_per_output, same_as_both, same_as_input
from gpunet.schema import FLOATS, GradientFunction, Input, Output, register


def _from_output(gradient_type: str) -> GradientFunction:
    """The gradient is a function of the forward output and its gradient."""

    def gradient(g: GradientBuilder) -> list[OperatorDef]:
        return g.single(gradient_type, [g.output(0), g.output_grad(0)], [g.input_grad(0)])

    return gradient


def _activation(type: str, formula: str, derivative: str, flops: int) -> None:
    register(
        type,
        inputs=[Input("X", "tensor of any shape", FLOATS)],
        outputs=[Output("Y", "tensor of the shape and type of X")],
        inplace=[(0, 0)],
        infer=same_as_input,
        gradient=_from_output(f"{type}Gradient"),
        flops=flops_per_output(flops),
        elementwise=True,
        doc=f"Elementwise ``Y = {formula}``.",
    )
    register(
        f"{type}Gradient",
        inputs=[Input("Y", "output of the forward operator", FLOATS), Input("dY", "gradient of Y", FLOATS)],
        outputs=[Output("dX", "gradient of X")],
        inplace=[(1, 0)],
        infer=same_as_both,
        flops=flops_per_output(flops + 1),
        elementwise=True,
        doc=f"``dX = dY * {derivative}``.",
    )


_activation("Relu", "max(X, 0)", "(Y > 0)", 1)
_activation("Sigmoid", "1 / (1 + exp(-X))", "Y (1 - Y)", 4)
_activation("Tanh", "tanh(X)", "(1 - Y^2)", 4)

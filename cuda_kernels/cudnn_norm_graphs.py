"""The graphs of batch and of layer normalization, see :mod:`gpunet.cuda_kernels.cudnn_graphs`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpunet.cuda_kernels.cudnn_graphs import Descriptor, Maker, Operand, packed
from gpunet.specs import Shape, format_shape


def _column(shape: Shape, channels_last: bool, dtype: str = "float32", output: bool = False) -> Operand:
    """One number a channel."""
    vector = (1, shape[1], *(1 for _ in shape[2:]))
    return Operand(vector, packed(vector, channels_last), dtype, output)


def _number(rank: int) -> Operand:
    ones = (1,) * rank
    return Operand(ones, ones, "float32", value=True)


@dataclass(frozen=True)
class BatchNorm(Descriptor):
    """Batch normalization in training, or its gradient; statistics, scale and bias are float32.

    Attributes:
        x: logical shape N C spatial, with two or three spatial dimensions.
    """

    dtype: str
    x: Shape
    channels_last: bool = False
    backward: bool = False

    def operands(self) -> dict[str, Operand]:
        """Forward: x, scale, bias, mean, var, epsilon, momentum, then y, saved_mean, saved_inv_std,
        new_mean, new_var.

        Backward: x, scale, dy, mean, inv_std, then dx, dscale, dbias.
        """
        last = self.channels_last
        strides = packed(self.x, last)
        found = {"x": Operand(self.x, strides, self.dtype), "scale": _column(self.x, last)}
        if self.backward:
            found["dy"] = Operand(self.x, strides, self.dtype)
            found |= {name: _column(self.x, last) for name in ("mean", "inv_std")}
            found["dx"] = Operand(self.x, strides, self.dtype, output=True)
            outputs: tuple[str, ...] = ("dscale", "dbias")
        else:
            found |= {name: _column(self.x, last) for name in ("bias", "mean", "var")}
            found |= {name: _number(len(self.x)) for name in ("epsilon", "momentum")}
            found["y"] = Operand(self.x, strides, self.dtype, output=True)
            outputs = ("saved_mean", "saved_inv_std", "new_mean", "new_var")
        return found | {name: _column(self.x, last, output=True) for name in outputs}

    def build(self, make: Maker) -> None:
        """One node."""
        given = [name for name, operand in self.operands().items() if not operand.output]
        inputs = {name: make.input(name) for name in given}
        if self.backward:
            results = make.graph.batchnorm_backward(
                grad=inputs["dy"],
                input=inputs["x"],
                scale=inputs["scale"],
                mean=inputs["mean"],
                inv_variance=inputs["inv_std"],
            )
        else:
            results = make.graph.batchnorm(
                input=inputs["x"],
                scale=inputs["scale"],
                bias=inputs["bias"],
                in_running_mean=inputs["mean"],
                in_running_var=inputs["var"],
                epsilon=inputs["epsilon"],
                momentum=inputs["momentum"],
            )
        for name, tensor in zip([n for n, o in self.operands().items() if o.output], results, strict=True):
            make.output(name, tensor)

    def against(self) -> str | None:
        """Channels that do not fill a load of 16 bytes; types."""
        step = {"float32": 4, "float16": 8, "bfloat16": 8}.get(self.dtype)
        if step is None:
            return f"cuDNN does not normalize batches of {self.dtype}"
        if self.x[1] % step:
            return f"there are {self.x[1]} channels, cuDNN wants a multiple of {step} of {self.dtype}"
        if math.prod(self.x) == 0:
            return "there is nothing to compute"
        return None

    def __str__(self) -> str:
        kind = "gradient" if self.backward else "training"
        order = "NHWC" if self.channels_last else "NCHW"
        return f"batch normalization {kind} {self.dtype} {order} {format_shape(self.x)}"


@dataclass(frozen=True)
class LayerNorm(Descriptor):
    """Normalization of each row of a matrix in training, or its gradient; statistics are float32, scale and
    bias are of the type of the data.
    """

    dtype: str
    rows: int
    columns: int
    backward: bool = False

    def operands(self) -> dict[str, Operand]:
        """Forward: x, scale, bias, epsilon, then y, mean, inv_std. Backward: x, scale, dy, mean, inv_std,
        then dx, dscale, dbias.
        """

        def operand(shape: Shape, dtype: str, output: bool = False) -> Operand:
            return Operand((*shape, 1, 1), packed((*shape, 1, 1)), dtype, output)

        whole, row, column = (self.rows, self.columns), (1, self.columns), (self.rows, 1)
        found = {"x": operand(whole, self.dtype), "scale": operand(row, self.dtype)}
        if self.backward:
            found["dy"] = operand(whole, self.dtype)
            found |= {name: operand(column, "float32") for name in ("mean", "inv_std")}
            found["dx"] = operand(whole, self.dtype, output=True)
            return found | {name: operand(row, self.dtype, output=True) for name in ("dscale", "dbias")}
        found |= {"bias": operand(row, self.dtype), "epsilon": _number(4)}
        found["y"] = operand(whole, self.dtype, output=True)
        return found | {name: operand(column, "float32", output=True) for name in ("mean", "inv_std")}

    def build(self, make: Maker) -> None:
        """One node."""
        if self.backward:
            results = make.graph.layernorm_backward(
                grad=make.input("dy"),
                input=make.input("x"),
                scale=make.input("scale"),
                mean=make.input("mean"),
                inv_variance=make.input("inv_std"),
            )
        else:
            results = make.graph.layernorm(
                norm_forward_phase=make.library.norm_forward_phase.TRAINING,
                input=make.input("x"),
                scale=make.input("scale"),
                bias=make.input("bias"),
                epsilon=make.input("epsilon"),
            )
        for name, tensor in zip([n for n, o in self.operands().items() if o.output], results, strict=True):
            make.output(name, tensor)

    def against(self) -> str | None:
        """Types; empty tensors."""
        if self.dtype not in ("float32", "float16", "bfloat16"):
            return f"cuDNN does not normalize rows of {self.dtype}"
        if self.rows * self.columns == 0:
            return "there is nothing to compute"
        return None

    def __str__(self) -> str:
        kind = "gradient" if self.backward else "training"
        return f"layer normalization {kind} {self.dtype} {self.rows}x{self.columns}"

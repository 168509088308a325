"""The graphs that cuDNN is asked for, as frozen descriptors, and how each is built.

A descriptor says all that a plan depends on: shapes, strides, element types, attributes. It names its
    operands; the number of an operand in cuDNN (its uid) is its place in :meth:`operands`, counted from 1.
    Shapes are logical, channels second; the order in memory is in the strides. Nothing here imports cuDNN:
    :mod:`gpunet.cuda_kernels.cudnn` passes it in with a :class:`Maker`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from gpunet.specs import Shape, format_shape

#: cuDNN's name of each element type, and its bytes.
TYPES: Final = {
    "float32": ("FLOAT", 4),
    "float16": ("HALF", 2),
    "bfloat16": ("BFLOAT16", 2),
    "float64": ("DOUBLE", 8),
    "int8": ("INT8", 1),
    "int32": ("INT32", 4),
}
#: Words of an epilogue that take no operand.
ACTIVATIONS: Final = ("relu", "sigmoid")
#: Bytes that every address must be a multiple of: what cuDNN assumes of a tensor unless told otherwise.
ALIGNMENT: Final = 16


def packed(shape: Shape, channels_last: bool = False) -> Shape:
    """Strides in elements of a tensor without gaps; ``channels_last`` stores dimension 1 innermost."""
    order = list(range(len(shape)))
    if channels_last:
        order.append(order.pop(1))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


@dataclass(frozen=True)
class Operand:
    """A tensor at the edge of a graph: logical shape, strides in elements, element type, and whether the
    graph writes it. ``value`` marks a number that is passed from the host.
    """

    shape: Shape
    strides: Shape
    dtype: str
    output: bool = False
    value: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a packed tensor."""
        return math.prod(self.shape) * TYPES[self.dtype][1]


def data_type(library: Any, dtype: str) -> Any:
    """The value of cuDNN for an element type."""
    return getattr(library.data_type, TYPES[dtype][0])


class Maker:
    """Declares the operands of a descriptor in a graph.

    Attributes:
        graph: the ``pygraph``.
        library: the module ``cudnn``, for its enumerations.
    """

    def __init__(self, library: Any, graph: Any, operands: dict[str, Operand]) -> None:
        self.library = library
        self.graph = graph
        self._operands = operands
        self._uids = {name: uid for uid, name in enumerate(operands, 1)}

    def type(self, dtype: str) -> Any:
        """The value of cuDNN for an element type."""
        return data_type(self.library, dtype)

    def input(self, name: str) -> Any:
        """The tensor of an operand that the graph reads."""
        operand = self._operands[name]
        return self.graph.tensor(
            dim=list(operand.shape),
            stride=list(operand.strides),
            data_type=self.type(operand.dtype),
            is_pass_by_value=operand.value,
            name=name,
            uid=self._uids[name],
        )

    def output(self, name: str, tensor: Any) -> None:
        """Makes a result of the graph an operand that it writes."""
        operand = self._operands[name]
        tensor.set_output(True).set_uid(self._uids[name]).set_data_type(self.type(operand.dtype))
        tensor.set_dim(list(operand.shape)).set_stride(list(operand.strides))


class Descriptor(ABC):
    """One graph. Subclasses are frozen dataclasses of plain values: their ``repr`` is part of the key of
    plans.
    """

    #: Element type of the data.
    dtype: str

    @abstractmethod
    def operands(self) -> dict[str, Operand]:
        """Operands by name, in the order of their uids."""

    @abstractmethod
    def build(self, make: Maker) -> None:
        """Adds the operations to the graph."""

    def against(self) -> str | None:
        """Why cuDNN is known to have no plan, whatever the device; ``None`` if it may have one."""
        return None

    @property
    def compute(self) -> str:
        """Element type of sums."""
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True)
class Convolution(Descriptor):
    """A convolution ``Y = W * X`` with what follows it, or one of its gradients.

    Attributes:
        kind: ``forward``; ``data`` (dX of W and dY: also the transposed convolution); ``filter`` (dW of X
            and dY).
        dtype: element type of X and W; ``int8`` sums in int32.
        x, w, y: logical shapes: N C spatial, M C/groups kernel, N M spatial. Two or three spatial
            dimensions; a signal is an image of height 1.
        stride, dilation, head, tail: one number a spatial dimension; padding before and after.
        channels_last: whether channels are innermost in memory, in X, W and Y alike.
        epilogue: what is done to the result of ``forward``, in order: ``scale`` and ``bias`` (one number a
            channel), ``add`` (a tensor like Y), ``relu`` or ``sigmoid``.
        result: element type of Y; by default that of X.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("forward", "data", "filter")

    kind: str
    dtype: str
    x: Shape
    w: Shape
    y: Shape
    stride: Shape
    dilation: Shape
    head: Shape
    tail: Shape
    channels_last: bool = False
    epilogue: tuple[str, ...] = ()
    result: str = ""

    def operands(self) -> dict[str, Operand]:
        """X, W, [scale, bias, add], Y; the gradients have x, w, y too, with the one that they write last."""
        last = self.channels_last
        vector = (1, self.w[0], *(1 for _ in self.stride))

        def operand(shape: Shape, dtype: str, output: bool = False) -> Operand:
            return Operand(shape, packed(shape, last), dtype, output)

        shapes = {"x": self.x, "w": self.w, "y": self.y}
        written = {"forward": "y", "data": "x", "filter": "w"}[self.kind]
        found = {name: operand(shape, self.dtype) for name, shape in shapes.items() if name != written}
        for word in self.epilogue:
            if word == "add":
                found["add"] = operand(self.y, self.dtype)
            elif word not in ACTIVATIONS:
                wide = word == "scale" or self.dtype == "int8"
                found[word] = operand(vector, "float32" if wide else self.dtype)
        found[written] = operand(shapes[written], self.result or self.dtype, output=True)
        return found

    def build(self, make: Maker) -> None:
        """One convolution node, then one node for each word of the epilogue."""
        graph = make.graph
        geometry: dict[str, Any] = {
            "pre_padding": list(self.head),
            "post_padding": list(self.tail),
            "stride": list(self.stride),
            "dilation": list(self.dilation),
            "compute_data_type": make.type("int32" if self.dtype == "int8" else self.compute),
        }
        if self.kind == "data":
            make.output("x", graph.conv_dgrad(loss=make.input("y"), filter=make.input("w"), **geometry))
            return
        if self.kind == "filter":
            make.output("w", graph.conv_wgrad(image=make.input("x"), loss=make.input("y"), **geometry))
            return
        result = graph.conv_fprop(image=make.input("x"), weight=make.input("w"), **geometry)
        if self.dtype == "int8" and self.epilogue:
            result.set_data_type(make.type("int32"))
        for word in self.epilogue:
            if word in ACTIVATIONS:
                result = getattr(graph, word)(input=result)
            elif word == "add":
                result = graph.add(a=result, b=make.input("add"))
            else:
                result = getattr(graph, word)(input=result, **{word: make.input(word)})
        make.output("y", result)

    def against(self) -> str | None:
        """Empty tensors, negative padding; with channels first, all but a bias and an activation after it."""
        if 0 in (*self.x, *self.w, *self.y):
            return "there is nothing to compute"
        if min(*self.head, *self.tail) < 0:
            return f"padding is {[*self.head, *self.tail]}, cuDNN takes none below 0"
        if not self.channels_last and {"scale", "add"} & set(self.epilogue):
            return "cuDNN scales or adds after a convolution with channels innermost only"
        if not self.channels_last and self.epilogue[:1] in [(word,) for word in ACTIVATIONS]:
            return "cuDNN has no activation without a bias before it but with channels innermost"
        return None

    def __str__(self) -> str:
        what = "+".join((f"convolution {self.kind}", *self.epilogue))
        order = "NHWC" if self.channels_last else "NCHW"
        return f"{what} {self.dtype} {order} {format_shape(self.x)} with {format_shape(self.w)}"


@dataclass(frozen=True)
class MatrixProduct(Descriptor):
    """``out = act(op(a) op(b) + bias)`` for a batch of packed row-major matrices; bias is one number a
    column.
    """

    dtype: str
    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False
    batch: int = 1
    epilogue: tuple[str, ...] = ()

    def operands(self) -> dict[str, Operand]:
        """a, b, [bias], out."""
        m, n, k, batch = self.m, self.n, self.k, self.batch
        found = {
            "a": Operand((batch, m, k), (m * k, *((1, m) if self.trans_a else (k, 1))), self.dtype),
            "b": Operand((batch, k, n), (n * k, *((1, k) if self.trans_b else (n, 1))), self.dtype),
        }
        if "bias" in self.epilogue:
            found["bias"] = Operand((1, 1, n), (n, n, 1), self.dtype)
        return found | {"out": Operand((batch, m, n), (m * n, n, 1), self.dtype, output=True)}

    def build(self, make: Maker) -> None:
        """One product, then one node for each word of the epilogue."""
        result = make.graph.matmul(
            A=make.input("a"), B=make.input("b"), compute_data_type=make.type(self.compute)
        )
        for word in self.epilogue:
            if word == "relu":
                result = make.graph.relu(input=result)
            else:
                result = make.graph.bias(input=result, bias=make.input(word))
        make.output("out", result)

    def against(self) -> str | None:
        """Odd rows of two-byte types, which no engine reads; :meth:`as_convolution` may do."""
        extents = (self.m if self.trans_a else self.k), (self.k if self.trans_b else self.n)
        if TYPES[self.dtype][1] == 2 and any(extent % 2 for extent in extents):
            return f"rows of {extents[0]} and {extents[1]} {self.dtype} numbers, cuDNN wants even numbers"
        return None

    def as_convolution(self) -> Convolution | None:
        """The same product with filters of one pixel, which have plans for any sizes and for float32 without
        TF32: a convolution where b is transposed, its gradient of the data where nothing is, that of the
        filters where a is. ``None`` for batches, where both are, and for gradients with an epilogue.
        """
        forward = self.trans_b and not self.trans_a
        if self.batch != 1 or (self.trans_a and self.trans_b) or (self.epilogue and not forward):
            return None
        m, n, k, ones, zeros = self.m, self.n, self.k, (1, 1), (0, 0)
        if forward:
            kind, shapes = "forward", ((m, k), (n, k), (m, n))
        elif self.trans_a:
            kind, shapes = "filter", ((k, n), (m, n), (k, m))
        else:
            kind, shapes = "data", ((m, n), (k, n), (m, k))
        x, w, y = ((*shape, 1, 1) for shape in shapes)
        return Convolution(kind, self.dtype, x, w, y, ones, ones, zeros, zeros, epilogue=self.epilogue)

    def __str__(self) -> str:
        sizes = f"{self.m}x{self.k} . {self.k}x{self.n}"
        return "+".join((f"matrix product {self.dtype} {self.batch} times {sizes}", *self.epilogue))


@dataclass(frozen=True)
class Settings:
    """What plans may do.

    Attributes:
        tf32: whether float32 factors may be rounded to 10 bits of mantissa.
        deterministic: whether only plans are taken that give the same bits each time.
        workspace: most bytes of scratch.
        tune: how many plans are timed to find the fastest; 1 takes the first that cuDNN offers.
    """

    tf32: bool = False
    deterministic: bool = True
    workspace: int = 256 << 20
    tune: int = 1

    def forbidden(self, descriptor: Descriptor) -> list[str]:
        """Names of the numerical notes of plans that are not taken."""
        notes = ["REDUCED_PRECISION_REDUCTION"]
        if not self.tf32 and descriptor.dtype == "float32":
            notes += ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"]
        return notes + ["NONDETERMINISTIC"] * self.deterministic

    def key(self) -> dict[str, Any]:
        """What a plan depends on; how many were timed matters only as whether any were."""
        return dataclasses.asdict(self) | {"tune": self.tune > 1}

"""How the second operand of an elementwise operator lines up with the first.

Two rules live side by side. By default shapes broadcast as in NumPy. With ``broadcast=1`` Caffe2's older rule
holds: the result has the shape of A, B covers a run of A's dimensions that begins at ``axis`` (by default the
last ones), and leading and trailing dimensions of 1 in B match anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpunet.arguments import Arg, Arguments, Bool, Int, Str
from gpunet.errors import ArgumentError, ShapeError
from gpunet.rules import broadcast_shapes
from gpunet.specs import Shape, format_shape

#: Size and strides of a dimension.
Group: TypeAlias = tuple[int, tuple[int, ...]]
#: The arguments of the older rule; without ``broadcast`` they have no effect, as in Caffe2.
AXIS_ARGS: tuple[Arg, ...] = (
    Int("axis", -1, "dimension of A that the first dimension of B lies along, -1 to line up the last ones"),
    Str("axis_str", "", "the same as a letter of `order` (C, say); not together with `axis`"),
    Str("order", "NCHW", "names of the dimensions of A, for `axis_str`"),
)
BROADCAST_ARGS: tuple[Arg, ...] = (
    Bool("broadcast", False, "line B up with A by `axis` instead of broadcasting both as NumPy does"),
    *AXIS_ARGS,
)


def legacy_axis(args: Arguments, a: Shape, b: Shape) -> int:
    """The dimension of A that B begins at; raises :class:`ArgumentError` where arguments do not fit."""
    axis: int = args.axis
    if args.axis_str:
        if axis != -1:
            raise ArgumentError(
                f"arguments 'axis' ({axis}) and 'axis_str' ({args.axis_str!r}) are given, wanted one"
            )
        axis = args.order.find(args.axis_str) if len(args.axis_str) == 1 else -1
        if axis < 0:
            raise ArgumentError(
                f"argument 'axis_str' is {args.axis_str!r}, wanted one letter of {args.order!r}"
            )
    elif axis == -1:
        axis = len(a) - len(b)
    if not 0 <= axis <= len(a) - len(b):
        raise ArgumentError(
            f"argument 'axis' is {axis}, wanted 0 to {len(a) - len(b)} "
            f"to lay B ({format_shape(b)}) along A ({format_shape(a)})"
        )
    return axis


def legacy_shape(args: Arguments, a: Shape, b: Shape) -> Shape:
    """The shape of B with ones added to have as many dimensions as A, after the older rule.

    Raises:
        ShapeError: B has more dimensions than A, or one that is neither A's nor a leading or trailing 1.
        ArgumentError: ``axis`` or ``axis_str`` do not fit the shapes.
    """
    if all(n == 1 for n in b):
        return (1,) * len(a)
    if len(b) > len(a):
        raise ShapeError(
            f"B ({format_shape(b)}) has {len(b)} dimensions, "
            f"wanted at most the {len(a)} of A ({format_shape(a)}) with broadcast=1"
        )
    axis = legacy_axis(args, a, b)
    begin, end = 0, len(b)
    while b[begin] == 1:
        begin += 1
    while b[end - 1] == 1:
        end -= 1
    if b[begin:end] != a[axis + begin : axis + end]:
        raise ShapeError(
            f"B ({format_shape(b)}) does not fit A ({format_shape(a)}) from dimension {axis} on, "
            "wanted equal dimensions up to leading and trailing ones of B"
        )
    return (1,) * axis + b + (1,) * (len(a) - axis - len(b))


def align(args: Arguments, a: Shape, b: Shape) -> tuple[Shape, Shape, Shape]:
    """The shapes of A and B with ones added to equal ranks, and the shape of the result.

    Raises ShapeError where the shapes do not fit, ArgumentError where ``axis`` or ``axis_str`` do not.
    """
    if a == b:
        return a, b, a
    if args.broadcast:
        return a, legacy_shape(args, a, b), a
    result = broadcast_shapes(a, b)
    rank = len(result)
    return (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, result


def strides_along(shape: Shape, full: Shape) -> list[int]:
    """Strides in elements of a contiguous tensor of ``shape`` in the dimensions of ``full`` (of equal rank):
    0 where it is broadcast.
    """
    strides, step = [], 1
    for size, whole in zip(reversed(shape), reversed(full), strict=True):
        strides.append(0 if size != whole or size == 1 else step)
        step *= size
    return strides[::-1]


def collapse(full: Shape, *operands: Sequence[int]) -> list[Group]:
    """The dimensions of ``full`` as (size, strides of operands), joined where they can be walked as one."""
    groups: list[Group] = []
    for size, *strides in zip(full, *operands, strict=True):
        if size == 1:
            continue
        if groups and all(outer == inner * size for outer, inner in zip(groups[-1][1], strides, strict=True)):
            groups[-1] = (groups[-1][0] * size, tuple(strides))
        else:
            groups.append((size, tuple(strides)))
    return groups

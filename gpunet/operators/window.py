"""Sliding windows: the arguments that convolution and pooling share, and the sizes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from gpunet.arguments import Arg, Arguments, Bool, Int, Ints, Str
from gpunet.errors import ArgumentError, ShapeError
from gpunet.specs import Shape, format_shape


class LegacyPad(IntEnum):
    """How padding is chosen where it is not given outright."""

    NOTSET = 0
    VALID = 1
    SAME = 2
    CAFFE_LEGACY_POOLING = 3


@dataclass(frozen=True, slots=True)
class Window:
    """A window that slides over the spatial dimensions of a tensor; tuples have one entry a dimension.

    Output position ``o`` of a dimension covers the input positions ``o * stride - head + k * dilation`` for
    ``k`` in ``range(kernel)``; those outside of the image are padding. ``head`` and ``tail`` may be negative
    (then the image is cropped).
    """

    kernel: Shape
    stride: Shape
    dilation: Shape
    head: Shape
    tail: Shape
    image: Shape
    output: Shape
    channels_last: bool

    @property
    def rank(self) -> int:
        """Number of spatial dimensions."""
        return len(self.kernel)

    @property
    def taps(self) -> int:
        """Number of positions inside of a window."""
        return math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """Number of windows in an image."""
        return math.prod(self.output)

    def shape(self, batch: int, channels: int) -> Shape:
        """Shape of an output with this many images and channels, in this window's order of dimensions."""
        return (batch, *self.output, channels) if self.channels_last else (batch, channels, *self.output)


def window_arguments(what: str) -> list[Arg]:
    """Argument declarations for a schema; ``what`` is "filter" or "window"."""
    return [
        Ints("kernels", (), f"size of the {what}, one number a spatial dimension"),
        Int("kernel", None, f"size of the {what}, the same in each dimension"),
        Int("kernel_h", None, f"height of the {what}"),
        Int("kernel_w", None, f"width of the {what}"),
        Ints("strides", (), f"steps of the {what}, one number a spatial dimension"),
        Int("stride", None, f"step of the {what}, the same in each dimension (1 where no step is given)"),
        Int("stride_h", None, "step downwards"),
        Int("stride_w", None, "step to the right"),
        Ints("pads", (), "padding: that before the image in each dimension, then that after it in each"),
        Int("pad", None, "padding on every side (0 where none is given)"),
        Int("pad_t", None, "padding on top"),
        Int("pad_l", None, "padding on the left"),
        Int("pad_b", None, "padding at the bottom"),
        Int("pad_r", None, "padding on the right"),
        Ints("dilations", (), f"distances between neighbours in the {what}, one number a spatial dimension"),
        Int(
            "dilation",
            None,
            f"distance between neighbours in the {what}, the same in each dimension (1 where none is given)",
        ),
        Int("dilation_h", None, "distance between neighbours, downwards"),
        Int("dilation_w", None, "distance between neighbours, to the right"),
        Int(
            "legacy_pad",
            0,
            "0: as given; 1 (VALID): none; 2 (SAME): output is input / stride, rounded up; 3 "
            "(CAFFE_LEGACY_POOLING): output sizes rounded "
            "up, as Caffe's pooling does",
            choices=tuple(int(p) for p in LegacyPad),
        ),
        Bool("global_pooling", False, f"the {what} is as large as the image"),
        Str("order", "NCHW", "order of dimensions: channels first or last", choices=("NCHW", "NHWC")),
    ]


def _per_dimension(args: Arguments, name: str, rank: int, default: int | None) -> Shape:
    """Reads ``names``, ``name`` or ``name_h`` and ``name_w``, in this order of preference."""
    listed: tuple[int, ...] = getattr(args, f"{name}s")
    single: int | None = getattr(args, name)
    sides = [getattr(args, f"{name}_{side}") for side in ("h", "w")]
    if listed:
        if len(listed) != rank:
            raise ArgumentError(
                f"argument '{name}s' is {list(listed)}, wanted {rank} numbers, one a spatial dimension"
            )
        return listed
    if single is not None:
        return (single,) * rank
    if all(side is not None for side in sides) and rank == 2:
        return (sides[0], sides[1])
    if any(side is not None for side in sides):
        given = ", ".join(f"'{name}_{s}'" for s, side in zip("hw", sides, strict=False) if side is not None)
        raise ArgumentError(
            f"argument {given} is given for {rank} spatial dimensions, wanted '{name}_h' and '{name}_w' for "
            f"two, or '{name}s'"
        )
    if default is None:
        raise ArgumentError(
            f"argument '{name}s' is missing, wanted '{name}s', '{name}', or '{name}_h' and '{name}_w'"
        )
    return (default,) * rank


def _given_pads(args: Arguments, rank: int) -> tuple[Shape, Shape] | None:
    if args.pads:
        if len(args.pads) != 2 * rank:
            raise ArgumentError(
                f"argument 'pads' is {list(args.pads)}, wanted {2 * rank} numbers, {rank} before and {rank} "
                "after the image"
            )
        return args.pads[:rank], args.pads[rank:]
    if args.pad is not None:
        return (args.pad,) * rank, (args.pad,) * rank
    sides = (args.pad_t, args.pad_l, args.pad_b, args.pad_r)
    if all(side is not None for side in sides) and rank == 2:
        return (args.pad_t, args.pad_l), (args.pad_b, args.pad_r)
    if any(side is not None for side in sides):
        raise ArgumentError(
            f"arguments 'pad_t', 'pad_l', 'pad_b', 'pad_r' are {sides} for {rank} spatial dimensions, "
            "wanted all four for two, or 'pads'"
        )
    return None


def resolve_window(args: Arguments, shape: Sequence[int], *, kernel: Shape | None = None) -> Window:
    """The window that the arguments of an operator mean for an input of this shape.

    ``kernel`` serves where the arguments do not give a size. Raises :class:`ArgumentError` for sizes that
    make no sense and :class:`ShapeError` where the window is larger than the padded image. Sizes follow
    Caffe2: without ``legacy_pad``, ``floor((image + head + tail - (dilation * (kernel - 1) + 1)) / stride) +
    1``.
    """
    rank = len(shape) - 2
    if rank < 1:
        raise ShapeError(
            f"input X of shape {format_shape(tuple(shape))} has {len(shape)} dimensions, wanted at least 3: "
            "batch, channels and a spatial one"
        )
    channels_last = args.order == "NHWC"
    image = tuple(shape[1:-1] if channels_last else shape[2:])
    mode = LegacyPad(args.legacy_pad)
    pads = _given_pads(args, rank)
    if pads is not None and mode in (LegacyPad.VALID, LegacyPad.SAME):
        raise ArgumentError(
            f"argument 'legacy_pad' is {mode.value} ({mode.name}) beside explicit padding, wanted one of them"
        )
    head, tail = pads or ((0,) * rank, (0,) * rank)
    stride = _per_dimension(args, "stride", rank, 1)
    dilation = _per_dimension(args, "dilation", rank, 1)
    if args.global_pooling:
        if any(p != 0 for p in (*head, *tail)) or any(n != 1 for n in (*stride, *dilation)):
            raise ArgumentError(
                f"argument 'global_pooling' is given with pads {[*head, *tail]}, strides {list(stride)} and "
                f"dilations {list(dilation)}, "
                "wanted no padding, stride 1 and dilation 1"
            )
        ones = (1,) * rank
        return Window(image, ones, ones, head, tail, image, ones, channels_last)
    if kernel is None or args.kernels or args.kernel is not None or args.kernel_h is not None:
        kernel = _per_dimension(args, "kernel", rank, None)
    for name, values in (("kernels", kernel), ("strides", stride), ("dilations", dilation)):
        if any(n < 1 for n in values):
            raise ArgumentError(f"argument {name!r} is {list(values)}, wanted numbers of at least 1")
    if mode is LegacyPad.CAFFE_LEGACY_POOLING and any(p < 0 for p in (*head, *tail)):
        raise ArgumentError(f"argument 'pads' is {[*head, *tail]}, wanted numbers of at least 0")
    sizes = [
        _output_size(mode, image[d], kernel[d], stride[d], dilation[d], head[d], tail[d]) for d in range(rank)
    ]
    return Window(
        kernel,
        stride,
        dilation,
        tuple(s[1] for s in sizes),
        tuple(s[2] for s in sizes),
        image,
        tuple(s[0] for s in sizes),
        channels_last,
    )


def _output_size(
    mode: LegacyPad, image: int, kernel: int, stride: int, dilation: int, head: int, tail: int
) -> tuple[int, int, int]:
    """(output size, head, tail) of one dimension."""
    extent = dilation * (kernel - 1) + 1
    if mode is LegacyPad.SAME:
        if dilation != 1:
            raise ArgumentError(
                f"argument 'legacy_pad' is 2 (SAME) with dilation {dilation}, wanted dilation 1"
            )
        output = -(-image // stride)
        needed = (output - 1) * stride + kernel - image
        head = int(needed / 2)
        return output, head, needed - head
    if mode is LegacyPad.CAFFE_LEGACY_POOLING:
        tail = head
    if image + head + tail < extent:
        raise ShapeError(
            f"input X has {image} positions in a spatial dimension, {image + head + tail} with padding, "
            f"wanted at least {extent} for "
            f"kernel {kernel} with dilation {dilation}"
        )
    output = (image + head + tail - extent) // stride + 1
    if mode is LegacyPad.CAFFE_LEGACY_POOLING:
        rounded_up = -(-(image + 2 * head - extent) // stride) + 1
        if head > 0 and (rounded_up - 1) * stride >= image + head:
            # Caffe drops a last window that would start in the padding behind the image.
            rounded_up -= 1
        tail = head + stride * (rounded_up - output)
        output = rounded_up
    return output, head, tail


def transposed_arguments() -> list[Arg]:
    """Argument declarations of a transposed convolution: those of the window that it goes back along."""
    wanted = ("kernel", "stride", "pad", "order")
    return [
        *(arg for arg in window_arguments("filter") if arg.name.startswith(wanted)),
        Ints("adjs", (), "further positions behind the output, at most a step, one number a dimension"),
        Int("adj", None, "further positions behind the output, the same in each dimension (0 by default)"),
        Int("adj_h", None, "further positions at the bottom"),
        Int("adj_w", None, "further positions on the right"),
        Int(
            "legacy_pad",
            0,
            "0: as given; 1 (VALID) and 2 (SAME): no padding is taken away, whatever 'pads' says",
            choices=tuple(int(p) for p in (LegacyPad.NOTSET, LegacyPad.VALID, LegacyPad.SAME)),
        ),
    ]


def resolve_transposed(
    args: Arguments, shape: Sequence[int], kernel: Shape, *, of_output: bool = False
) -> Window:
    """The window that a transposed convolution goes back along: its ``image`` is the operator's output, and
    its ``output`` the operator's input.

    Args:
        args: of the operator, as :func:`transposed_arguments` declares them.
        shape: of the input X of the operator; with ``of_output`` of the output Y.
        kernel: size of the filter, where the arguments do not give one.
        of_output: which of the two ``shape`` is.

    Raises:
        ArgumentError: sizes make no sense.
        ShapeError: nothing would be left of the output.

    Sizes follow Caffe2: ``(input - 1) * stride + kernel + adj - head - tail``.
    """
    rank = len(shape) - 2
    channels_last = args.order == "NHWC"
    given = tuple(shape[1:-1] if channels_last else shape[2:])
    if args.kernels or args.kernel is not None or args.kernel_h is not None:
        kernel = _per_dimension(args, "kernel", rank, None)
    stride, adj = _per_dimension(args, "stride", rank, 1), _per_dimension(args, "adj", rank, 0)
    head, tail = _given_pads(args, rank) or ((0,) * rank, (0,) * rank)
    if LegacyPad(args.legacy_pad) is not LegacyPad.NOTSET:
        head = tail = (0,) * rank
    for name, values, least in (
        ("kernels", kernel, 1),
        ("strides", stride, 1),
        ("adjs", adj, 0),
        ("pads", (*head, *tail), 0),
    ):
        if any(n < least for n in values):
            raise ArgumentError(f"argument {name!r} is {list(values)}, wanted numbers of at least {least}")
    if any(a > s for a, s in zip(adj, stride, strict=True)):
        raise ArgumentError(
            f"argument 'adjs' is {list(adj)}, wanted numbers of at most the strides {list(stride)}"
        )
    more = [k + a - h - t for k, a, h, t in zip(kernel, adj, head, tail, strict=True)]
    if of_output:
        inner = tuple((n - m) // s + 1 for n, m, s in zip(given, more, stride, strict=True))
        return Window(kernel, stride, (1,) * rank, head, tail, given, inner, channels_last)
    outer = tuple((n - 1) * s + m for n, m, s in zip(given, more, stride, strict=True))
    if any(n < 1 for n in outer):
        raise ShapeError(
            f"input X has {list(given)} positions, with kernel {list(kernel)}, strides {list(stride)} and "
            f"padding {[*head, *tail]} the output has {list(outer)}, wanted at least 1 in each dimension"
        )
    return Window(kernel, stride, (1,) * rank, head, tail, outer, given, channels_last)

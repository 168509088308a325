"""Every cuDNN graph that the runtime can make, planned for a described GPU, in a process of its own.

python -m tests.gpu.plan TABLE DEVICE      one line of JSON a graph
python -m tests.gpu.plan keep DEVICE       a plan through the cache on disk
python -m tests.gpu.plan names             names and parameters of the installed front end
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpunet.cuda_kernels import (
    conv_direct,
    convolution,
    cudnn,
    cudnn_layer_norm,
    cudnn_normalization,
    cudnn_products,
    fused_convolution,
    gemm,
    quantization,
)
from gpunet.cuda_kernels.cudnn_cache import Plan, PlanCache, plan_key
from gpunet.cuda_kernels.cudnn_graphs import Convolution, Descriptor, MatrixProduct, Settings
from gpunet.definitions import make_operator
from gpunet.operator import Operator
from gpunet.specs import Shape, spec
from tests.operators import (
    cases_conv_transpose,
    cases_convolution,
    cases_fused_convolution,
    cases_quantization,
)

DEVICES = {"h200": 90, "a100": 80, "a10": 86, "t4": 75}
#: (images, channels, side, filters, kernel, stride, padding).
LAYERS = {
    "lenet": [(64, 1, 28, 20, 5, 1, 0), (64, 20, 12, 50, 5, 1, 0)],
    "resnet20": [
        (128, 3, 32, 16, 3, 1, 1),
        (128, 16, 32, 16, 3, 1, 1),
        (128, 16, 32, 32, 3, 2, 1),
        (128, 16, 32, 32, 1, 2, 0),
        (128, 32, 16, 32, 3, 1, 1),
        (128, 32, 16, 64, 3, 2, 1),
        (128, 64, 8, 64, 3, 1, 1),
    ],
    "resnet18": [
        (32, 3, 224, 64, 7, 2, 3),
        (32, 64, 56, 64, 3, 1, 1),
        (32, 64, 56, 128, 3, 2, 1),
        (32, 64, 56, 128, 1, 2, 0),
        (32, 128, 28, 128, 3, 1, 1),
        (32, 128, 28, 256, 3, 2, 1),
        (32, 256, 14, 256, 3, 1, 1),
        (32, 256, 14, 512, 3, 2, 1),
        (32, 512, 7, 512, 3, 1, 1),
    ],
    "resnet50": [
        (32, 64, 56, 256, 1, 1, 0),
        (32, 256, 56, 64, 1, 1, 0),
        (32, 256, 56, 512, 1, 2, 0),
        (32, 512, 28, 128, 1, 1, 0),
        (32, 1024, 14, 2048, 1, 2, 0),
        (32, 2048, 7, 512, 1, 1, 0),
    ],
}


BOTH = ("float32", "float16")


def of_operator(op: Operator, x: Any, w: Any, bias: bool) -> Iterator[Convolution]:
    """Forward and gradients of one operator."""
    yield convolution.descriptor("forward", op, x, w, bias=bias)
    for kind in ("data", "filter"):
        yield convolution.descriptor(kind, op, x, w)


def operator_cases() -> Iterator[Convolution]:
    """The rows of the table of the operator, in float32 and float16 (and as they are)."""
    for case in cases_convolution.CASES:
        if case.raises is not None or case.inputs[0].ndim > 5:
            continue
        op = Operator(case.definition())
        for dtype in {case.inputs[0].dtype.name, "float32", "float16"}:
            x, w = (spec(a.shape, dtype) for a in case.inputs[:2])
            yield from of_operator(op, x, w, len(case.inputs) > 2)


def transposed_cases() -> Iterator[Convolution]:
    """The rows of the transposed convolution: what it and its gradient ask for."""
    for case in cases_conv_transpose.CASES:
        if case.raises is not None or case.type != "ConvTranspose":
            continue
        op = Operator(case.definition())
        for dtype in {case.inputs[0].dtype.name, "float32", "float16"}:
            inputs = [spec(a.shape, dtype) for a in case.inputs]
            (y,) = op.infer(inputs)
            window = conv_direct.window_of(op, y, inputs[1])
            padded = [sum(sizes) for sizes in zip(window.image, window.head, window.tail, strict=True)]
            sizes = zip(padded, window.kernel, window.stride, strict=True)
            # Behind all windows may be a whole step: cuDNN would count one window more.
            if window.output == tuple((n - k) // step + 1 for n, k, step in sizes):
                yield from of_operator(op, y, inputs[1], bias=False)


def layers(*nets: str, types: Sequence[str] = BOTH) -> Iterator[Convolution]:
    """The convolutions of networks, in types and both orders of dimensions."""
    for net in nets:
        for n, c, side, m, k, stride, pad in LAYERS[net]:
            for order in ("NCHW", "NHWC"):
                definition = make_operator(
                    "Conv", ["x", "w"], ["y"], kernel=k, stride=stride, pad=pad, order=order
                )
                shapes = ((n, c, side, side), (m, c, k, k))
                if order == "NHWC":
                    shapes = ((n, side, side, c), (m, k, k, c))
                for dtype in types:
                    x, w = (spec(shape, dtype) for shape in shapes)
                    yield from of_operator(Operator(definition), x, w, bias=net == "lenet")


def square(
    kind: str, dtype: str, last: bool, epilogue: tuple[str, ...] = (), result: str = ""
) -> Convolution:
    x, one = (4, 32, 14, 14), (1, 1)
    return Convolution(kind, dtype, x, (32, 32, 3, 3), x, one, one, one, one, last, epilogue, result)


def fused(*types: str) -> Iterator[Descriptor]:
    """Convolutions with what follows them, and transposed."""
    for dtype in types:
        for last in (False, True):
            yield square("forward", dtype, last, ("bias", "relu"))
            one, two = (1, 1), (2, 2)
            shapes = (4, 16, 28, 28), (32, 16, 4, 4), (4, 32, 14, 14)
            yield Convolution("data", dtype, *shapes, two, one, one, one, last)
        yield square("forward", dtype, True, ("scale", "bias", "add", "relu"))
        yield square("forward", dtype, True, ("scale", "bias", "relu"))


#: Epilogues that the pass makes.
EPILOGUES = ("bias+relu", "bias+sigmoid", "bias+add", "bias+add+relu", "relu", "sigmoid", "add", "add+relu")


def epilogues(*types: str) -> Iterator[Convolution]:
    """What FusedConv asks for: of the rows of its table, and of layers of networks in both orders."""
    found: list[tuple[Operator, list[Shape]]] = []
    for case in cases_fused_convolution.CASES:
        if case.raises is None and case.type == "FusedConv":
            found.append((Operator(case.definition()), [a.shape for a in case.inputs[:2]]))
    for n, c, side, m, k, stride, pad in (*LAYERS["lenet"], *LAYERS["resnet20"]):
        for epilogue in EPILOGUES if (c, m, k) == (16, 16, 3) else EPILOGUES[:4]:
            words = [word for word in epilogue.split("+") if word in ("bias", "add")]
            geometry = {"kernel": k, "stride": stride, "pad": pad, "epilogue": epilogue}
            for order, shapes in (
                ("NCHW", [(n, c, side, side), (m, c, k, k)]),
                ("NHWC", [(n, side, side, c), (m, k, k, c)]),
            ):
                definition = make_operator("FusedConv", ["x", "w", *words], ["y"], order=order, **geometry)
                found.append((Operator(definition), shapes))
    for op, shapes in found:
        for dtype in types:
            graphs = fused_convolution.graphs(op, *(spec(shape, dtype) for shape in shapes))
            yield from (graph for graph in graphs if graph.against() is None)


def in_int8() -> Iterator[Descriptor]:
    """Convolutions of whole numbers."""
    yield square("forward", "int8", False, (), "int32")
    yield square("forward", "int8", True, (), "float32")
    yield square("forward", "int8", True, ("scale", "bias", "relu"), "int8")


def quantized() -> Iterator[Convolution]:
    """The sums of the symmetric rows of the table of the operator, and of some larger layers."""
    for case in cases_quantization.CONVOLUTIONS:
        if case.args["symmetric"]:
            x, w = (spec(case.inputs[i].shape, "int8") for i in (0, 3))
            yield quantization.descriptor(Operator(case.definition()), x, w)
    for n, c, side, m, k, stride, pad in LAYERS["resnet18"]:
        for order in ("NCHW", "NHWC"):
            names = [f"i{i}" for i in range(8)]
            geometry = {"kernel": k, "stride": stride, "pad": pad, "order": order, "symmetric": 1}
            op = Operator(make_operator("QLinearConv", names, ["y"], **geometry))
            last = order == "NHWC"
            shapes = ((n, side, side, c), (m, k, k, c)) if last else ((n, c, side, side), (m, c, k, k))
            yield quantization.descriptor(op, *(spec(shape, "int8") for shape in shapes))


def norms(*types: str) -> Iterator[Descriptor]:
    """Batch and layer normalization."""
    for dtype in types:
        for backward in (False, True):
            type = "SpatialBNGradient" if backward else "SpatialBN"
            for order, shape in (("NCHW", (8, 16, 9, 7)), ("NHWC", (8, 9, 7, 16)), ("NCHW", (6, 24, 10))):
                names = [f"i{i}" for i in range(5)]
                outputs = ["dx", "ds", "db"] if backward else ["y", "i3", "i4", "m", "s"]
                op = Operator(make_operator(type, names, outputs, order=order))
                yield cudnn_normalization.descriptor(op, spec(shape, dtype), backward=backward)
            type = "LayerNormGradient" if backward else "LayerNorm"
            for axis, shape in ((1, (200, 77)), (2, (4, 50, 768)), (0, (3, 1000))):
                names = [f"i{i}" for i in range(6 if backward else 3)]
                arguments = {"axis": axis, "elementwise_affine": 1}
                op = Operator(make_operator(type, names, ["a", "b", "c"], **arguments))
                yield cudnn_layer_norm.descriptor(op, spec(shape, dtype))


def products(half: str, *types: str) -> Iterator[Descriptor]:
    """Matrix products of a half type, and odd ones as convolutions."""
    for epilogue in ((), ("bias", "relu")):
        yield MatrixProduct(half, 64, 32, 128, trans_b=True, epilogue=epilogue)
        for dtype in types:
            yield MatrixProduct(dtype, 33, 77, 51, trans_b=True, epilogue=epilogue).as_convolution()  # type: ignore[misc]
    # Those of LeNet's fully connected layers and of their gradients, and odd ones.
    for m, n, k in ((64, 500, 800), (64, 10, 500), (500, 800, 64), (33, 77, 51)):
        for trans_a, trans_b in ((False, True), (False, False), (True, False)):
            for dtype in types:
                yield from cudnn_products.graphs(gemm.Product(dtype, m, n, k, trans_a, trans_b))[-1:]


def quick() -> Iterator[Descriptor]:
    """A few that are not compiled at run time."""
    for last in (False, True):
        for dtype in ("float32", "float16"):
            for kind in Convolution.KINDS:
                yield square(kind, dtype, last)
            yield square("forward", dtype, last, ("bias", "relu"))


def bfloat16() -> Iterator[Descriptor]:
    """Some of all of them in bfloat16."""
    yield from layers("lenet", "resnet20", types=["bfloat16"])
    yield from fused("bfloat16")
    yield from epilogues("bfloat16")
    yield from norms("bfloat16")
    yield from products("bfloat16", "bfloat16")


TABLES = {
    "quick": quick,
    "operators": operator_cases,
    "transposed": transposed_cases,
    "layers": lambda: layers(*LAYERS),
    "fused": lambda: [*fused(*BOTH), *in_int8()],
    "epilogues": lambda: epilogues(*BOTH),
    "quantized": quantized,
    "norms": lambda: norms(*BOTH),
    "products": lambda: products("float16", *BOTH),
    "bfloat16": bfloat16,
}


def table(name: str) -> list[Descriptor]:
    """The graphs of a table, each once, without those that need no plan."""
    return list(dict.fromkeys(TABLES[name]()))


def target(device: str) -> cudnn.Target:
    return cudnn.Target(Path(__file__).with_name(f"{device}.json").read_text())


def plan(descriptor: Descriptor, place: cudnn.Target) -> dict[str, Any]:
    """What came of one graph; a plan that is found is loaded again from its bytes."""
    line: dict[str, Any] = {"graph": str(descriptor), "against": descriptor.against()}
    try:
        found = next(cudnn.candidates(place, descriptor, Settings()))
    except cudnn.NoPlanError as error:
        return line | {"reason": str(error)}
    loaded = cudnn.load(found, place).get_workspace_size()
    return line | {"name": found.name, "workspace": found.workspace, "loaded": loaded}


def keep(place: cudnn.Target) -> dict[str, Any]:
    """Whether a plan had to be made, and what the one that the cache gives is."""
    descriptor, made = square("forward", "float32", False), []
    key = plan_key(place.properties, descriptor, Settings(), cudnn.versions())

    def make() -> Plan:
        made.append(1)
        return next(cudnn.candidates(place, descriptor, Settings()))

    found = PlanCache().find(key, make)
    graph = cudnn.load(found, place)
    operands = {uid: 4096 * uid for uid in range(1, len(descriptor.operands()) + 1)}
    line = {"made": len(made), "name": found.name, "workspace": graph.get_workspace_size(), "execute": []}
    # Without a handle nothing runs, but all before that does: a missing operand is found.
    for given in (operands, {1: 4096}):
        try:
            graph.execute(given, 1 << 20)
        except (RuntimeError, ValueError) as error:
            line["execute"].append(str(error))
    return line


def names() -> dict[str, list[str]]:
    """Parameters of what has a signature; names of the rest."""
    lib = cudnn.library()
    found: dict[str, list[str]] = {"version": [str(lib.__version__)]}
    for owner, prefix in ((lib, ""), (lib.pygraph, "pygraph.")):
        for name in dir(owner):
            try:
                found[prefix + name] = list(inspect.signature(getattr(owner, name)).parameters)
            except (TypeError, ValueError):
                found[prefix + name] = []
    for kind in ("data_type", "numerical_note", "heur_mode", "norm_forward_phase"):
        found[kind] = [n for n in dir(getattr(lib, kind)) if n.isupper()]
    found["pygraph"] = list(inspect.signature(lib.pygraph.__init__).parameters)
    return found


def main(what: str, device: str = "") -> None:
    if what == "names":
        print(json.dumps(names()))
    elif what == "keep":
        print(json.dumps(keep(target(device))))
    else:
        for descriptor in table(what):
            print(json.dumps(plan(descriptor, target(device))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

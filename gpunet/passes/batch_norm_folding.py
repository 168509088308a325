"""Batch-norm folding: for inference, a convolution takes over the scale and shift of the batch norm behind
it.

The new filters are constants: computed once, and again when one of the blobs that they come from changes.
"""

from __future__ import annotations

from collections.abc import Callable

from gpunet.definitions import make_operator
from gpunet.graph import Graph, Node, Value
from gpunet.operator import Operator
from gpunet.operators.convolution import CONVOLUTIONS
from gpunet.passes.uses import Uses, with_nodes
from gpunet.proto import OperatorDef


def fold_batch_norms(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Replaces each Conv whose output only a SpatialBN in test mode reads, where weights and statistics are
    entries.

    The convolution runs where the batch norm ran: what it reads must not be overwritten before.
    """
    uses = Uses(graph, kept)
    written = {value.name for node in graph.nodes for value in node.outputs}
    nodes: list[Node | None] = list(graph.nodes)
    for position, norm in enumerate(graph.nodes):
        start = uses.writer.get(norm.inputs[0]) if norm.inputs else None
        conv = None if start is None else graph.nodes[start]
        if start is None or conv is None or not _foldable(conv, norm, written):
            continue
        images, middle = conv.inputs[0], conv.outputs[0]
        if uses.readers[middle] != [position] or not uses.droppable(middle):
            continue
        if uses.writes_between(images, start, position) or images.name == norm.outputs[0].name:
            continue
        nodes[start], nodes[position] = _fold(conv, norm)
    return with_nodes(graph, nodes)


def _foldable(conv: Node, norm: Node, written: set[str]) -> bool:
    if conv.op is None or norm.op is None or conv.op.type not in CONVOLUTIONS or norm.op.type != "SpatialBN":
        return False
    parameters = [*conv.inputs[1:], *norm.inputs[1:]]
    return (
        bool(norm.op.args.is_test)
        and norm.op.args.order == conv.op.args.order
        and len(norm.inputs) == 5
        and not conv.after
        and not norm.after
        and all(value.entry and value.name not in written for value in parameters)
        and len({value.spec.dtype for value in parameters if hasattr(value.spec, "dtype")}) == 1
    )


def _fold(conv: Node, norm: Node) -> tuple[Node, Node]:
    """The node that computes filters and bias, and the convolution that uses them in place of both nodes."""
    conv_op, norm_op = conv.op, norm.op
    if conv_op is None or norm_op is None:
        raise TypeError("folding wants two operators")
    filters = conv.inputs[1]
    names = [f"{norm_op.outputs[0]}/folded_w", f"{norm_op.outputs[0]}/folded_b"]
    sources = [filters, *norm.inputs[1:], *conv.inputs[2:]]
    definition = make_operator(
        "FoldBatchNorm",
        [v.name for v in sources],
        names,
        epsilon=norm_op.args.epsilon,
        order=conv_op.args.order,
    )
    outputs = (Value(names[0], filters.spec), Value(names[1], norm.inputs[1].spec))
    fold_op = Operator(definition, conv_op.net_name, conv_op.index)
    fold = Node(fold_op, tuple(sources), outputs, conv.index, constant=True)
    replaced = OperatorDef()
    replaced.CopyFrom(conv_op.definition)
    del replaced.input[1:], replaced.output[:]
    replaced.input.extend(names)
    replaced.output.append(norm_op.outputs[0])
    for arg in [a for a in replaced.arg if a.name == "no_bias"]:
        replaced.arg.remove(arg)
    folded_op = Operator(replaced, norm_op.net_name, norm_op.index)
    return fold, Node(folded_op, (conv.inputs[0], *outputs), norm.outputs, norm.index)

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
from gpunet.proto import OperatorDef


def fold_batch_norms(graph: Graph, kept: Callable[[str], bool]) -> Graph:
    """Replaces each Conv whose output only a SpatialBN in test mode reads, where weights and statistics are
    entries.
    """
    readers: dict[Value, list[Node]] = {}
    writers = {value: node for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    written = {value.name for node in graph.nodes for value in node.outputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        conv = writers.get(node.inputs[0]) if node.inputs else None
        if conv is None or not _foldable(conv, node, readers, written, kept):
            nodes.append(node)
            continue
        fold, folded = _fold(conv, node)
        at = next(i for i, other in enumerate(nodes) if other is conv)
        nodes[at : at + 1] = [fold]
        nodes.append(folded)
    made = {value for node in nodes for value in node.outputs}
    finals = {name: values for name, values in graph.finals.items() if any(v in made for v in values)}
    return Graph(nodes, graph.entries, finals)


def _foldable(
    conv: Node, norm: Node, readers: dict[Value, list[Node]], written: set[str], kept: Callable[[str], bool]
) -> bool:
    if conv.op is None or norm.op is None or conv.op.type not in CONVOLUTIONS or norm.op.type != "SpatialBN":
        return False
    middle = conv.outputs[0]
    parameters = [*conv.inputs[1:], *norm.inputs[1:]]
    return (
        bool(norm.op.args.is_test)
        and norm.op.args.order == conv.op.args.order
        and readers.get(middle) == [norm]
        and not kept(middle.name)
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

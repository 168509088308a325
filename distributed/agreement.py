"""Whether all ranks are about to run the same net, on tensors of the same kinds, in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gpunet.distributed.communicator import Communicator
from gpunet.distributed.failure import CollectiveError
from gpunet.net import NetLike, as_net_def
from gpunet.proto import NetDef, OperatorDef
from gpunet.specs import BlobSpec


def check_same_graph(
    communicator: Communicator, net: NetLike, specs: Mapping[str, BlobSpec | None] | None = None
) -> None:
    """Compares a net, and what it starts from, with those of all other ranks.

    Args:
        communicator: the ranks; all of them call this.
        net: a ``NetDef``, its bytes, or a :class:`gpunet.Net`. Names, types, inputs, outputs, arguments and
            engines of its operators count; the devices that they are placed on do not, since ranks have
            different ones.
        specs: shape and type of the blobs that have to be alike on all ranks (parameters, say).

    Raises:
        CollectiveError: on all ranks, with the ranks that differ from the first, and the first operator or
            blob in which they do.
    """
    definition = as_net_def(net)
    blobs = {name: str(spec) for name, spec in sorted((specs or {}).items())}
    operators = [_digest(op) for op in definition.op]
    whole = hashlib.sha256(repr((definition.name, operators, blobs)).encode()).hexdigest()
    if len(set(communicator.all_gather_object(whole))) == 1:
        return
    # The exchange of all operators is for the case of an error alone.
    all_operators = communicator.all_gather_object(operators)
    first = next(
        (i for i in range(max(map(len, all_operators))) if len({_at(ops, i) for ops in all_operators}) > 1),
        None,
    )
    if first is not None:
        told = communicator.all_gather_object(_describe(definition, first))
        what = f"operator {first} of net {definition.name!r}"
    else:
        all_blobs = communicator.all_gather_object(blobs)
        names = sorted(set().union(*all_blobs))
        name = next((n for n in names if len({found.get(n) for found in all_blobs}) > 1), None)
        told = [f"{name!r} {found.get(name, 'missing')}" for found in all_blobs]
        what = f"blob {name!r} of net {definition.name!r}"
        if name is None:
            told = communicator.all_gather_object(repr(definition.name))
            what = "the name of the net"
    raise _disagreement(what, told)


def check_same_settings(communicator: Communicator, settings: Mapping[str, Any]) -> None:
    """Compares numbers and words that a run depends on with those of all other ranks.

    Args:
        communicator: the ranks; all of them call this.
        settings: by name; anything that JSON can say.

    Raises:
        CollectiveError: on all ranks, with the first setting that differs and what ranks have.
    """
    found = communicator.all_gather_object(dict(settings))
    for name in sorted(set().union(*found)):
        told = [repr(there[name]) if name in there else "none" for there in found]
        if len(set(told)) > 1:
            raise _disagreement(f"setting {name!r}", told)


def _disagreement(what: str, told: Sequence[str]) -> CollectiveError:
    """The error of ranks that have different things, with those that differ from the first."""
    others = "; ".join(f"rank {r} has {text}" for r, text in enumerate(told) if text != told[0])
    return CollectiveError(
        f"{what} is not the same on all ranks: rank 0 has {told[0]}; {others}; wanted the same model, "
        "settings and versions everywhere"
    )


def _at(operators: list[str], index: int) -> str:
    return operators[index] if index < len(operators) else ""


def _without_device(op: OperatorDef) -> OperatorDef:
    copy = OperatorDef()
    copy.CopyFrom(op)
    copy.ClearField("device_option")
    copy.ClearField("debug_info")
    return copy


def _digest(op: OperatorDef) -> str:
    return hashlib.sha256(_without_device(op).SerializeToString(deterministic=True)).hexdigest()[:16]


def _describe(net: NetDef, index: int) -> str:
    """An operator in words: type, blobs, arguments."""
    if index >= len(net.op):
        return f"only {len(net.op)} operators"
    op = net.op[index]
    args = ", ".join(" ".join(str(arg).split()) for arg in op.arg)
    return f"[{op.type}] {', '.join(op.input)} -> {', '.join(op.output)}{f' ({args})' if args else ''}"

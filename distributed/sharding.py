"""Optimizer state shared between ranks: each keeps, and updates, one of ``size`` equal parts.

In place of an all-reduce, gradients of a bucket are reduced and scattered, each rank updates its part of the
bucket's parameters, and the parts are gathered. What is sent stays the same; an optimizer's state takes
``1 / size`` of the memory. Source: S. Rajbhandari et al., ZeRO, SC 2020, the first stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.definitions import make_operator
from gpunet.distributed import world
from gpunet.distributed.agreement import check_same_graph
from gpunet.distributed.communicator import Communicator
from gpunet.distributed.compression import Bucket
from gpunet.distributed.data_parallel import MEBI, WEIGHT, add_weight, fill_buckets, metric_bucket
from gpunet.errors import ArgumentError, CheckpointError, GradientError
from gpunet.model import Model, Parameter
from gpunet.optimizers import ITERATION, SGD, Adadelta, Adagrad, Adam, Optimizer, RmsProp
from gpunet.proto import OperatorDef
from gpunet.workspace import Workspace

#: Optimizers that treat each element by itself, so that a part of a parameter can be updated alone.
ELEMENTWISE: Final = (SGD, Adagrad, Adadelta, RmsProp, Adam)


@dataclass(frozen=True)
class _Shard:
    """A bucket of gradients, the parameters that belong to them, and zeros up to equal parts."""

    bucket: Bucket
    parameters: tuple[str, ...]
    padding: str
    #: The rank's part of the parameters.
    part: str
    #: Blobs of the optimizer, of the part's shape.
    state: tuple[str, ...] = ()


class ShardedOptimizer:
    """A model whose optimizer state is shared between ranks; made by :func:`shard_optimizer`."""

    def __init__(self, model: Model, shards: Sequence[_Shard], communicator: Communicator) -> None:
        self.model = model
        self._shards = tuple(shards)
        self._communicator = communicator

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._communicator.size

    def start(self, workspace: Workspace) -> None:
        """Gives all ranks the parameters of rank 0, and each its part of them.

        Call it when the init net has run, and whenever parameters were fed. Nets that differ between ranks
        raise :class:`gpunet.distributed.CollectiveError`.
        """
        check_same_graph(self._communicator, self.model.net)
        for name in self.model.training_blobs():
            value = workspace.value(name)
            if isinstance(value, np.ndarray):
                value = np.array(value, order="C")
                self._communicator.broadcast(value, 0)
                workspace.feed(name, value)
        for shard in self._shards:
            flat = np.concatenate([workspace.fetch(name).reshape(-1) for name in shard.parameters])
            workspace.feed(shard.part, self._mine(flat))

    def set_weight(self, workspace: Workspace, samples: int, total: int) -> None:
        """Says how many of the samples of a step this rank has; without it all ranks count alike."""
        if not 0 <= samples <= total or total == 0:
            raise ArgumentError(f"{samples} of {total} samples, wanted 0 or more of at least 1")
        workspace.feed(WEIGHT, np.array([samples / total], np.float32))

    def state(self, workspace: Workspace) -> dict[str, np.ndarray]:
        """The whole optimizer state, by blob, on every rank: vectors that fit any number of ranks."""
        found = {}
        for shard in self._shards:
            for name in shard.state:
                part = workspace.fetch(name)
                whole = np.empty(part.size * self.size, part.dtype)
                self._communicator.all_gather(part, whole)
                found[name] = whole[: shard.bucket.size]
        return found

    def restore(self, workspace: Workspace, state: Mapping[str, np.ndarray]) -> None:
        """Takes what :meth:`state` gave, possibly with another number of ranks.

        Raises:
            CheckpointError: blobs are missing, or of another size.
        """
        for shard in self._shards:
            for name in shard.state:
                whole = state.get(name)
                if whole is None or whole.shape != (shard.bucket.size,):
                    found = "missing" if whole is None else f"of shape {whole.shape}"
                    raise CheckpointError(
                        f"optimizer state {name!r} is {found}, wanted {shard.bucket.size} elements"
                    )
                workspace.feed(name, self._mine(whole))

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of optimizer state on this rank, and what they would be on each without sharing."""
        here = whole = 0
        for shard in self._shards:
            for _ in shard.state:
                here += self._part_size(shard.bucket) * shard.bucket.dtype.itemsize
                whole += shard.bucket.nbytes
        return here, whole

    def _part_size(self, bucket: Bucket) -> int:
        return -(-bucket.size // self.size)

    def _mine(self, flat: np.ndarray) -> np.ndarray:
        """This rank's part of a vector, with zeros behind it."""
        size = -(-flat.size // self.size)
        part = np.zeros(size, flat.dtype)
        values = flat[size * self.rank : size * (self.rank + 1)]
        part[: values.size] = values
        return part


def shard_optimizer(
    model: Model,
    optimizer: Optimizer,
    *,
    bucket_bytes: int = 25 * MEBI,
    metrics: Sequence[str] = (),
    communicator: Communicator | None = None,
) -> ShardedOptimizer:
    """Reduces gradients over the ranks and updates parameters, with the optimizer's state shared.

    It takes the place of :func:`gpunet.distributed.data_parallel.parallelize` and of ``optimizer.apply``.

    Args:
        model: has its gradients.
        optimizer: one of :data:`ELEMENTWISE`, without clipping.
        bucket_bytes: gradients that are reduced together.
        metrics: scalar blobs that become the mean over all ranks.
        communicator: the ranks; :func:`gpunet.distributed.world` by default.

    Raises:
        ArgumentError: an optimizer that needs whole parameters or the norm of all gradients.
        GradientError: there are no gradients, sparse ones, one for several parameters, or an optimizer.
    """
    if type(optimizer) not in ELEMENTWISE or optimizer.clip_norm:
        raise ArgumentError(
            f"{optimizer!r} needs more than parts of parameters, wanted one of "
            f"{', '.join(kind.__name__ for kind in ELEMENTWISE)}, with clip_norm 0"
        )
    if model.net.makes(ITERATION):
        raise GradientError(f"model {model.name!r} has an optimizer already, wanted none")
    owners = {p.gradient: p for p in model.params if isinstance(p.gradient, str)}
    used = [p for p in model.params if p.gradient is not None]
    if not used or len(owners) != len(used):
        raise GradientError(
            f"model {model.name!r} has {len(used)} parameters with gradients and {len(owners)} dense "
            "gradients, wanted a dense one of its own for each, and at least one"
        )
    ranks = world() if communicator is None else communicator
    add_weight(model, ranks.size)
    operators = list(model.net.proto.op)
    inserted: dict[int, list[OperatorDef]] = {}
    shards = []
    for decay in (True, False):
        chosen = [p for p in used if p.decay == decay]
        name = f"shard_{'decayed' if decay else 'plain'}"
        for bucket, position in zip(
            *fill_buckets(model, chosen, operators, bucket_bytes, bucket_bytes, name), strict=True
        ):
            shard = _make_shard(model, bucket, owners, ranks.size)
            shards.append((shard, decay))
            inserted.setdefault(position, []).extend(_scatter(shard))
    if metrics:
        inserted.setdefault(len(operators) - 1, []).extend(_mean(metric_bucket(model, metrics)))
    model.insert_operators(inserted)
    made = _update_parts(model, optimizer, shards)
    for shard in made:
        whole = f"{shard.part}s"
        model.net.add("Allgather", [shard.part], [whole])
        tensors = [*shard.parameters, shard.padding]
        model.net.add("UnpackBucket", [whole, *tensors], tensors)
    return ShardedOptimizer(model, made, ranks)


def _make_shard(model: Model, bucket: Bucket, owners: Mapping[Any, Parameter], size: int) -> _Shard:
    part = -(-bucket.size // size)
    kind = bucket.dtype
    padding = model.add_blob(f"{bucket.name}_padding", (part * size - bucket.size,), value=0.0, dtype=kind)
    mine = model.add_blob(f"{bucket.name}_part", (part,), value=0.0, dtype=kind)
    return _Shard(bucket, tuple(owners[blob].name for blob in bucket.blobs), padding, mine)


def _scatter(shard: _Shard) -> list[OperatorDef]:
    name = shard.bucket.name
    return [
        make_operator("PackBucket", [WEIGHT, *shard.bucket.blobs, shard.padding], [name]),
        make_operator("ReduceScatter", [name], [f"{name}_grad"]),
    ]


def _mean(bucket: Bucket) -> list[OperatorDef]:
    return [
        make_operator("PackBucket", [WEIGHT, *bucket.blobs], [bucket.name]),
        make_operator("Allreduce", [bucket.name], [bucket.name]),
        make_operator("UnpackBucket", [bucket.name, *bucket.blobs], bucket.blobs),
    ]


def _update_parts(model: Model, optimizer: Optimizer, shards: Sequence[tuple[_Shard, bool]]) -> list[_Shard]:
    """Applies the optimizer to the parts, as if they were the model's parameters."""
    parameters, known = model.params, list(model.state)
    model.params = [Parameter(s.part, decay, f"{s.bucket.name}_grad") for s, decay in shards]
    try:
        optimizer.apply(model)
    finally:
        model.params = parameters
    added = [name for name in model.state if name not in known]
    result = []
    for shard, _ in shards:
        own = tuple(name for name in added if name.startswith(f"{shard.part}_"))
        result.append(_Shard(shard.bucket, shard.parameters, shard.padding, shard.part, own))
    # Parts differ from rank to rank: checkpoints hold them whole, by ShardedOptimizer.state.
    parts = {name for shard in result for name in shard.state}
    model.state = [name for name in model.state if name not in parts]
    return result

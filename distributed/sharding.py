"""Optimizer state shared between ranks: each keeps, and updates, one of ``size`` equal parts.

In place of an all-reduce, gradients of a bucket are reduced and scattered, each rank updates its part of the
bucket's parameters, and the parts are gathered. What is sent stays the same; an optimizer's state takes
``1 / size`` of the memory. Source: S. Rajbhandari et al., ZeRO, SC 2020, the first stage.

Sums over whole parameters, and over all of them, which LARS, LAMB and clipping want, are those of the parts,
added up over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from gpunet import mixed_precision
from gpunet.definitions import make_operator
from gpunet.distributed.buckets import UNSCALE, Reductions
from gpunet.distributed.communicator import Communicator
from gpunet.distributed.compression import Bucket, NoCompression
from gpunet.distributed.data_parallel import DataParallel
from gpunet.errors import ArgumentError, CheckpointError, GradientError
from gpunet.large_batch import LAMB, LARS
from gpunet.model import Model, Parameter
from gpunet.optimizers import SGD, Adadelta, Adagrad, Adam, Optimizer, RmsProp
from gpunet.proto import NetDef, OperatorDef
from gpunet.workspace import Workspace

#: Optimizers whose state belongs to single elements, so that a part of a parameter can have a part of it.
SHARED: Final = (SGD, Adagrad, Adadelta, RmsProp, Adam, LARS, LAMB)


@dataclass(frozen=True)
class _Shard:
    """A bucket of gradients, and the parameters that belong to them.

    Attributes:
        bucket: the gradients.
        parameters: names, in the order of the gradients.
        padding: zeros up to equal parts.
        part: the rank's part of the parameters.
        starts: where the parameters begin in the part, and where the last one ends.
        state: blobs of the optimizer, of the part's shape.
    """

    bucket: Bucket
    parameters: tuple[str, ...]
    padding: str
    part: str
    starts: str
    state: tuple[str, ...] = ()

    def whole(self, state: str) -> list[str]:
        """The names that a blob of :attr:`state` has for whole parameters."""
        return [parameter + state.removeprefix(self.part) for parameter in self.parameters]


class ShardedOptimizer(DataParallel):
    """A model whose optimizer state is shared between ranks; made by :func:`shard_optimizer`."""

    def __init__(
        self, model: Model, shards: Sequence[_Shard], communicator: Communicator, micro_net: NetDef | None
    ) -> None:
        buckets = [shard.bucket for shard in shards]
        super().__init__(model, buckets, NoCompression(), communicator, (), micro_net)
        self._shards = tuple(shards)

    def start(self, workspace: Workspace) -> None:
        """Gives all ranks the parameters of rank 0, and each its part of them.

        Call it when the init net has run, and whenever parameters were fed. Nets that differ between ranks
        raise :class:`gpunet.distributed.CollectiveError`.
        """
        super().start(workspace)
        for shard in self._shards:
            flat = np.concatenate([workspace.fetch(name).reshape(-1) for name in shard.parameters])
            workspace.feed(shard.part, self._mine(flat))
            sizes = [math.prod(shape) for shape in shard.bucket.shapes]
            size = self._part_size(shard.bucket)
            ends = np.cumsum([0, *sizes], dtype=np.int64) - size * self.rank
            workspace.feed(shard.starts, np.clip(ends, 0, size))

    @property
    def own_blobs(self) -> tuple[str, ...]:
        """The rank's parts of the optimizer state."""
        return tuple(name for shard in self._shards for name in shard.state)

    @property
    def training_blobs(self) -> list[str]:
        """Those of the model, and the optimizer state of whole parameters."""
        shared = [whole for shard in self._shards for name in shard.state for whole in shard.whole(name)]
        return [*self.model.training_blobs(), *shared]

    def layout(self) -> dict[str, Any]:
        """Also how the parts make up the state of whole parameters."""
        shards = [
            {
                "shapes": [list(shape) for shape in shard.bucket.shapes],
                "state": {name: shard.whole(name) for name in shard.state},
            }
            for shard in self._shards
        ]
        return {**super().layout(), "shards": shards}

    def restore(
        self,
        workspace: Workspace,
        blobs: Mapping[str, Any],
        layout: Mapping[str, Any],
        own: Callable[[], Mapping[str, Any]],
    ) -> str:
        """Takes this rank's parts of the optimizer state, whoever wrote the checkpoint."""
        self.put_state(workspace, blobs)
        return super().restore(workspace, blobs, layout, own)

    def state(self, workspace: Workspace) -> dict[str, np.ndarray]:
        """The optimizer state of whole parameters, by the names that it has in one process, on every rank."""
        found: dict[str, np.ndarray] = {}
        for shard in self._shards:
            for name in shard.state:
                part = workspace.fetch(name)
                whole = np.empty(part.size * self.size, part.dtype)
                self._communicator.all_gather(part, whole)
                found.update(split_state(whole, shard.whole(name), shard.bucket.shapes))
        return found

    def put_state(self, workspace: Workspace, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state` gave, possibly with another number of ranks.

        Raises:
            CheckpointError: blobs are missing, or of another shape.
        """
        for shard in self._shards:
            for name in shard.state:
                pieces = []
                for whole, shape in zip(shard.whole(name), shard.bucket.shapes, strict=True):
                    value = state.get(whole)
                    if not isinstance(value, np.ndarray) or value.shape != shape:
                        found = "missing" if value is None else f"of shape {np.shape(value)}"
                        raise CheckpointError(f"optimizer state {whole!r} is {found}, wanted shape {shape}")
                    pieces.append(value.reshape(-1))
                workspace.feed(name, self._mine(np.concatenate(pieces)))

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


def split_state(
    whole: np.ndarray, names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, np.ndarray]:
    """Cuts the parts of all ranks, in a row, into one array for each parameter; zeros are left at the end."""
    found, begin = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        end = begin + math.prod(shape)
        found[name] = whole[begin:end].reshape(tuple(shape))
        begin = end
    return found


def shard_optimizer(
    model: Model,
    optimizer: Optimizer,
    *,
    bucket_bytes: int | None = None,
    metrics: Sequence[str] = (),
    accumulate: bool = False,
    communicator: Communicator | None = None,
) -> ShardedOptimizer:
    """Reduces gradients over the ranks and updates parameters, with the optimizer's state shared.

    It takes the place of :func:`gpunet.distributed.data_parallel.parallelize` and of ``optimizer.apply``.

    Args:
        model: has its gradients.
        optimizer: one of :data:`SHARED`.
        bucket_bytes: gradients that are reduced together; by default
            :func:`gpunet.distributed.buckets.bucket_sizes` chooses.
        metrics: scalar blobs that become the mean over all ranks.
        accumulate: make :attr:`DataParallel.micro_net` too.
        communicator: the ranks; :func:`gpunet.distributed.world` by default.

    Raises:
        ArgumentError: an optimizer whose state cannot be cut into equal parts.
        GradientError: there are no gradients, sparse ones, one for several parameters, or an optimizer.
    """
    if type(optimizer) not in SHARED:
        raise ArgumentError(
            f"the state of {type(optimizer).__name__} cannot be shared between ranks, wanted one of "
            f"{', '.join(kind.__name__ for kind in SHARED)}"
        )
    owners = {p.gradient: p for p in model.params if isinstance(p.gradient, str)}
    used = [p for p in model.params if p.gradient is not None]
    if not used or len(owners) != len(used):
        raise GradientError(
            f"model {model.name!r} has {len(used)} parameters with gradients and {len(owners)} dense "
            "gradients, wanted a dense one of its own for each, and at least one"
        )
    reductions = Reductions(model, communicator, bucket_bytes, bucket_bytes, accumulate=accumulate)
    ranks = reductions.communicator
    shards: list[tuple[_Shard, bool]] = []
    for decay in (True, False):
        chosen = [p for p in used if p.decay == decay]
        name = f"shard_{'decayed' if decay else 'plain'}"
        for bucket, position in reductions.fill(chosen, name):
            shard, padded = _make_shard(model, bucket, owners, ranks.size)
            shards.append((shard, decay))
            reductions.insert(position, reductions.writer.scatter(padded))
    reductions.add_metrics(metrics)
    behind = reductions.end + 1
    if behind < len(reductions.operators):
        _unscale_parts(reductions.operators[behind], [shard for shard, _ in shards])
        # Each rank has seen other elements.
        finite = mixed_precision.FINITE
        reductions.insert(behind, [make_operator("Allreduce", [finite], [finite], op="min")])
    micro_net = reductions.finish()
    made = _update_parts(model, optimizer, shards)
    for shard in made:
        whole = f"{shard.part}s"
        model.net.add("Allgather", [shard.part], [whole])
        tensors = [*shard.parameters, shard.padding]
        model.net.add("UnpackBucket", [whole, *tensors], tensors)
    return ShardedOptimizer(model, made, ranks, micro_net)


def _make_shard(
    model: Model, bucket: Bucket, owners: Mapping[Any, Parameter], size: int
) -> tuple[_Shard, Bucket]:
    """The shard of a bucket, and the bucket with its padding."""
    name, dtype, count = bucket.name, bucket.dtype, -(-bucket.size // size)
    missing = (count * size - bucket.size,)
    padding = model.add_blob(f"{name}_padding", missing, value=0.0, dtype=dtype)
    part = model.add_blob(f"{name}_part", (count,), value=0.0, dtype=dtype)
    starts = model.add_blob(f"{name}_starts", (len(bucket.blobs) + 1,), value=0, dtype="int64")
    shard = _Shard(bucket, tuple(owners[blob].name for blob in bucket.blobs), padding, part, starts)
    padded = replace(bucket, blobs=(*bucket.blobs, padding), shapes=(*bucket.shapes, missing))
    return shard, padded


def _unscale_parts(op: OperatorDef, shards: Sequence[_Shard]) -> None:
    """Makes the operator that scales gradients back do so with the parts."""
    if op.type != UNSCALE:
        raise GradientError(f"operator {op.type} comes behind the backward pass, wanted {UNSCALE} or none")
    parts = [f"{shard.bucket.name}_grad" for shard in shards]
    for names in (op.input, op.output):
        del names[1:]
        names.extend(parts)


class _Sums:
    """Appends sums over all ranks; the :class:`gpunet.optimizers.Parts` of shards."""

    def __init__(self, model: Model, shards: Sequence[_Shard]) -> None:
        self._model = model
        self._starts = {shard.part: shard.starts for shard in shards}

    def add_others(self, blob: str) -> None:
        self._model.net.add("Allreduce", [blob], [blob])

    def squares(self, part: str, tensors: Sequence[str]) -> tuple[str, str]:
        starts, name = self._starts[part], f"{part}_squares"
        self._model.net.add("SegmentSquares", [starts, *tensors], [name])
        self.add_others(name)
        return starts, name


def _update_parts(model: Model, optimizer: Optimizer, shards: Sequence[tuple[_Shard, bool]]) -> list[_Shard]:
    """Applies the optimizer to the parts, as if they were the model's parameters."""
    parameters, known = model.params, list(model.state)
    model.params = [Parameter(s.part, decay, f"{s.bucket.name}_grad") for s, decay in shards]
    try:
        optimizer.apply(model, parts=_Sums(model, [shard for shard, _ in shards]))
    finally:
        model.params = parameters
    added = [name for name in model.state if name not in known]
    result = [
        replace(shard, state=tuple(name for name in added if name.startswith(f"{shard.part}_")))
        for shard, _ in shards
    ]
    # Parts differ from rank to rank: they are no state of the model.
    parts = {name for shard in result for name in shard.state}
    model.state = [name for name in model.state if name not in parts]
    return result

"""Buckets: which gradients are reduced together, and the operators that do it.

A bucket is full when its gradients have so many bytes; they come in the order in which the backward pass
makes them, so that reductions begin as soon as there is something to reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gpunet.definitions import make_operator
from gpunet.distributed import world
from gpunet.distributed.communicator import Communicator
from gpunet.distributed.compression import Bucket, Compressor, NoCompression
from gpunet.dtypes import is_float
from gpunet.errors import ArgumentError, GradientError
from gpunet.memory_plan import ALIGNMENT
from gpunet.model import Model, Parameter
from gpunet.optimizers import ITERATION
from gpunet.proto import NetDef, OperatorDef
from gpunet.specs import TensorSpec

#: The blob of this rank's share of the samples of a step: what its gradients are multiplied with.
WEIGHT: Final = "data_parallel_weight"
#: The operator that scales gradients back in :mod:`gpunet.mixed_precision`.
UNSCALE: Final = "UnscaleGradients"
MEBI: Final = 1 << 20
#: Most bytes of a bucket, and how many buckets gradients are to fill at least, where nobody says.
LARGEST: Final = 25 * MEBI
SHARES: Final = 8


def bucket_sizes(model: Model, bucket_bytes: int | None, first_bytes: int | None) -> tuple[int, int]:
    """Bytes of a bucket and of the first one, where ``None`` asks for a choice.

    That is an eighth of all gradients, so that small models have something to reduce during the backward
    pass, but at most 25 MiB, and 1 MiB for the first one. Raises :class:`ArgumentError` for a number below 1.
    """
    specs = [model.specs.get(p.gradient) for p in model.params if isinstance(p.gradient, str)]
    total = sum(found.nbytes for found in specs if isinstance(found, TensorSpec))
    chosen = min(LARGEST, -(-total // SHARES)) or 1 if bucket_bytes is None else bucket_bytes
    first = min(MEBI, chosen) if first_bytes is None else first_bytes
    if chosen < 1 or first < 1:
        raise ArgumentError(
            f"bucket_bytes is {bucket_bytes} and first_bucket_bytes {first_bytes}, wanted at least 1"
        )
    return chosen, first


def end_of_backward(operators: Sequence[OperatorDef]) -> int:
    """Position of the last operator that makes gradients: what scales them back comes behind."""
    return next((i for i, op in enumerate(operators) if op.type == UNSCALE), len(operators)) - 1


class Reductions:
    """The operators that let ranks share the gradients of a model, on their way into its net.

    Args:
        model: has its gradients.
        communicator: the ranks; :func:`gpunet.distributed.world` by default.
        bucket_bytes: see :func:`bucket_sizes`.
        first_bucket_bytes: the same.
        accumulate: whether there will be micro-batches.

    Raises:
        GradientError: the model has an optimizer already.
        ArgumentError: a number that makes no sense.

    Attributes:
        communicator: the ranks.
        operators: the net as it was.
        end: the position of the last operator that makes gradients.
        writer: of the operators of buckets.
    """

    def __init__(
        self,
        model: Model,
        communicator: Communicator | None,
        bucket_bytes: int | None,
        first_bucket_bytes: int | None,
        *,
        accumulate: bool,
    ) -> None:
        if model.net.makes(ITERATION):
            raise GradientError(
                f"model {model.name!r} has an optimizer already, wanted its gradients reduced before one is "
                "applied"
            )
        self._model, self._accumulate = model, accumulate
        self._sizes = bucket_sizes(model, bucket_bytes, first_bucket_bytes)
        self.communicator = world() if communicator is None else communicator
        add_weight(model, self.communicator.size)
        self.operators = list(model.net.proto.op)
        self.end = end_of_backward(self.operators)
        self.writer = BucketWriter(model, accumulate=accumulate)
        self._inserted: dict[int, list[OperatorDef]] = {}

    def fill(
        self, parameters: Sequence[Parameter], name: str = "gradient_bucket"
    ) -> list[tuple[Bucket, int]]:
        """Buckets of the parameters' gradients, and where each is full (:func:`fill_buckets`)."""
        found = fill_buckets(self._model, parameters, self.operators[: self.end + 1], *self._sizes, name)
        return list(zip(*found, strict=True))

    def insert(self, position: int, operators: Sequence[OperatorDef]) -> None:
        """Puts operators behind a position, and behind those that were put there before."""
        self._inserted.setdefault(position, []).extend(operators)

    def add_metrics(self, metrics: Sequence[str]) -> None:
        """Reduces metrics as early as nothing waits for them (:func:`add_metrics`)."""
        add_metrics(self._model, metrics, self.operators[: self.end + 1], self.writer, self._inserted)

    def finish(self) -> NetDef | None:
        """Rewrites the model's net; returns that of micro-batches, where there are any."""
        self._model.insert_operators(self._inserted)
        if not self._accumulate:
            return None
        return make_micro_net(self._model, self.operators[: self.end + 1], self.writer)


def add_weight(model: Model, size: int) -> str:
    """The blob :data:`WEIGHT`, made in the init net for ``size`` equal ranks."""
    return model.add_blob(WEIGHT, (1,), value=1.0 / size)


class BucketWriter:
    """Makes the operators of buckets, and the blobs that they need; the emitter of compressors."""

    def __init__(self, model: Model, *, accumulate: bool) -> None:
        self._model = model
        self._accumulate = accumulate
        self._made: list[OperatorDef] = []
        #: For each bucket, operators of the micro net.
        self.gathering: list[OperatorDef] = []
        #: Blobs of compressors that ranks begin with alike.
        self.shared: list[str] = []

    def operator(self, type: str, inputs: Sequence[str], outputs: Sequence[str], **args: Any) -> None:
        """Appends an operator."""
        self._made.append(make_operator(type, inputs, outputs, **args))

    def state(self, name: str, size: int, filler: str = "ConstantFill") -> str:
        """Makes a blob that each rank keeps for itself."""
        self.shared.append(name)
        return self._model.add_blob(name, (size,), filler)

    def reduce(self, bucket: Bucket, compression: Compressor) -> list[OperatorDef]:
        """From the gradients to their sum over the ranks."""
        self._made = []
        sent = compression.compress(bucket, WEIGHT, self)
        if self._accumulate:
            self._drain(bucket)
        arrived = []
        for blob in sent:
            target = f"{blob}_gathered" if compression.gathers else blob
            self.operator("Allgather" if compression.gathers else "Allreduce", [blob], [target])
            arrived.append(target)
        compression.decompress(bucket, arrived, self)
        return self._made

    def scatter(self, bucket: Bucket) -> list[OperatorDef]:
        """From the gradients to this rank's part of their sum, the blob ``<bucket>_grad``."""
        self._made = []
        NoCompression().compress(bucket, WEIGHT, self)
        if self._accumulate:
            self._drain(bucket)
        self.operator("ReduceScatter", [bucket.name], [f"{bucket.name}_grad"])
        return self._made

    def _drain(self, bucket: Bucket) -> None:
        """Adds earlier micro-batches to what was just packed, before it is compressed."""
        at = next(i for i, op in enumerate(self._made) if op.type == "PackBucket")
        packed = self._made[at].output[0]
        # Sums of micro-batches are made in the type that is packed to.
        gathered, part = f"{bucket.name}_gathered", f"{bucket.name}_micro"
        pack = OperatorDef()
        pack.CopyFrom(self._made[at])
        pack.output[0] = part
        wanted = [arg for arg in pack.arg if arg.name == "dtype"]
        dtype = bucket.dtype if not wanted else None
        self._model.add_blob(
            gathered, (bucket.size,), value=0.0, dtype=dtype if dtype is not None else wanted[0].i
        )
        self._made.insert(at + 1, make_operator("DrainBucket", [packed, gathered], [packed, gathered]))
        self.gathering += [pack, make_operator("Add", [gathered, part], [gathered])]


def fill_buckets(
    model: Model,
    parameters: Sequence[Parameter],
    operators: Sequence[OperatorDef],
    bucket_bytes: int,
    first_bucket_bytes: int,
    name: str = "gradient_bucket",
) -> tuple[list[Bucket], list[int]]:
    """Buckets of dense gradients, filled in the order in which these are made, and where the last one of each
    bucket is made.

    Names of buckets are ``<name>_0``, ``<name>_1`` and so on. Raises :class:`GradientError` where a gradient
    is made by none of the operators, or its shape is not known.
    """
    made = {name: i for i, op in enumerate(operators) for name in op.output}
    wanted = dict.fromkeys(p.gradient for p in parameters if isinstance(p.gradient, str))
    order = sorted((made[blob], i, blob) for i, blob in enumerate(wanted) if blob in made)
    missing = [blob for blob in wanted if blob not in made]
    if missing:
        raise GradientError(f"no operator makes gradient {missing[0]!r}, wanted one of the backward pass")
    open_buckets: dict[np.dtype, list[tuple[str, TensorSpec]]] = {}
    buckets: list[Bucket] = []
    positions: list[int] = []

    def close(dtype: np.dtype, position: int) -> None:
        # Those first that leave the next one aligned: aligned ones are written straight into the bucket.
        members = sorted(open_buckets.pop(dtype), key=lambda member: member[1].nbytes % ALIGNMENT != 0)
        buckets.append(
            Bucket(
                f"{name}_{len(buckets)}",
                tuple(blob for blob, _ in members),
                tuple(found.shape for _, found in members),
                dtype,
            )
        )
        positions.append(position)

    for position, _, blob in order:
        found = model.specs.get(blob)
        if not isinstance(found, TensorSpec):
            raise GradientError(
                f"the shape of gradient {blob!r} is not known, wanted Model.input() for all inputs"
            )
        members = open_buckets.setdefault(found.dtype, [])
        members.append((blob, found))
        limit = bucket_bytes if buckets else min(first_bucket_bytes, bucket_bytes)
        if sum(s.nbytes for _, s in members) >= limit:
            close(found.dtype, position)
    for dtype in list(open_buckets):
        close(dtype, max(made[blob] for blob, _ in open_buckets[dtype]))
    return buckets, positions


def metric_bucket(model: Model, metrics: Sequence[str]) -> Bucket:
    """Scalars as a bucket; raises :class:`ArgumentError` for anything else."""
    specs = []
    for name in metrics:
        found = model.specs.get(name)
        if not isinstance(found, TensorSpec) or found.size != 1 or not is_float(found.dtype):
            raise ArgumentError(f"metric {name!r} is {found}, wanted a floating-point scalar")
        specs.append(found)
    return Bucket("metric_bucket", tuple(metrics), tuple(s.shape for s in specs), specs[0].dtype)


def add_metrics(
    model: Model,
    metrics: Sequence[str],
    operators: Sequence[OperatorDef],
    writer: BucketWriter,
    inserted: dict[int, list[OperatorDef]],
) -> None:
    """Inserts the reduction of metrics behind the last operator that has to do with one of them.

    That is early in the backward pass, which hides it. Raises :class:`ArgumentError` for metrics that are no
    floating-point scalars.
    """
    if not metrics:
        return
    bucket, names = metric_bucket(model, metrics), set(metrics)
    users = [i for i, op in enumerate(operators) if not names.isdisjoint([*op.input, *op.output])]
    # The first operator of the backward pass is behind all of the forward pass.
    position = max([len(model.forward_operators()), *users])
    inserted.setdefault(position, []).extend(writer.reduce(bucket, NoCompression()))


def make_micro_net(model: Model, operators: Sequence[OperatorDef], writer: BucketWriter) -> NetDef:
    """The net of a micro-batch: ``operators``, and those that gather gradients."""
    net = NetDef()
    net.CopyFrom(model.net.proto)
    del net.op[:]
    net.name = f"{model.net.name}_micro"
    net.op.extend(operators)
    net.op.extend(writer.gathering)
    made = {name for op in net.op for name in op.output}
    read = {name for op in net.op for name in op.input}
    kept = [name for name in net.external_input if name in read]
    more = dict.fromkeys(op.input[0] for op in writer.gathering if op.type == "Add")
    del net.external_input[:], net.external_output[:]
    net.external_input.extend(dict.fromkeys([*kept, *(name for name in more if name in made)]))
    return net

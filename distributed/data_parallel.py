"""Data parallelism: every rank trains the same model on its part of each batch, and gradients are summed.

::

    model.add_gradients("loss")
    ranks = parallelize(model)
    SGD(0.1).apply(model)
    workspace.run_once(model.init_net)
    ranks.start(workspace)

It rewrites the net: behind the operator that makes the last gradient of a bucket come PackBucket (which
multiplies with the rank's share of the batch), what compresses, Allreduce, what decompresses and
UnpackBucket. The memory plan has gradients written straight into the bucket. All of these operators are on
the lane of the collectives, in one order on all ranks, and the engine ``async_scheduling`` runs that lane
beside the backward pass. Weight decay, clipping and updates, which an optimizer appends afterwards, see the
mean gradient of the whole batch. So do the unscaling and the check for overflow of
:mod:`gpunet.mixed_precision`, which all ranks therefore decide alike.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpunet.blobs import spec_of
from gpunet.definitions import make_operator
from gpunet.distributed import world
from gpunet.distributed.agreement import check_same_graph, check_same_settings
from gpunet.distributed.buckets import UNSCALE, WEIGHT, Reductions, add_weight
from gpunet.distributed.communicator import Communicator
from gpunet.distributed.compression import Bucket, Compressor, NoCompression, compressor
from gpunet.errors import ArgumentError, GradientError, KernelError
from gpunet.gradient_maker import GradientSlice
from gpunet.model import Model
from gpunet.proto import NetDef, OperatorDef
from gpunet.workspace import Workspace

log = logging.getLogger("gpunet")

#: The blob that is 0 where a compressed sum overflowed and the step was skipped.
FINITE: Final = "data_parallel_finite"
_ONE: Final = "data_parallel_one"


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step, and what compression does to the gradients.

    Attributes:
        gradient_bytes: bytes of all dense gradients.
        sent_bytes: bytes given to collective operations in their place.
        buckets: number of buckets.
        error: Euclidean norm of what was not sent in the last step, over that of the rank's gradients; 0
            without compression, ``None`` where it is not kept (float16 without feedback) or before a step.
    """

    gradient_bytes: int
    sent_bytes: int
    buckets: int
    error: float | None

    @property
    def ratio(self) -> float:
        """How many times less is sent."""
        return self.gradient_bytes / self.sent_bytes if self.sent_bytes else 1.0


class DataParallel:
    """A model of which every rank trains a copy; made by :func:`parallelize`.

    Attributes:
        model: the model.
        buckets: its gradients, in the order in which they are reduced.
        compression: what makes them smaller.
        micro_net: forward and backward pass that only gather gradients, for all micro-batches of a step but
            the last, which runs ``model.net``; ``None`` without ``accumulate``.
        skipped: steps left out because a compressed sum overflowed.
    """

    def __init__(
        self,
        model: Model,
        buckets: Sequence[Bucket],
        compression: Compressor,
        communicator: Communicator,
        state: Sequence[str],
        micro_net: NetDef | None,
    ) -> None:
        self.model, self.buckets, self.compression = model, tuple(buckets), compression
        self.micro_net = micro_net
        self.skipped = 0
        self._communicator = communicator
        self._state = tuple(state)
        self._watched = model.net.makes(FINITE)

    @property
    def own_blobs(self) -> tuple[str, ...]:
        """Blobs of training that differ from rank to rank: what compression keeps back."""
        return self._state

    @property
    def training_blobs(self) -> list[str]:
        """Blobs that a checkpoint of one process holds, by the names that they have there."""
        return self.model.training_blobs()

    @property
    def kept_blobs(self) -> tuple[str, ...]:
        """What the net has to be created with in ``keep``, beside what its user wants, for :meth:`after_step`
        and :meth:`traffic`.
        """
        errors = (self.compression.error(bucket) for bucket in self.buckets)
        measured = [name for name in errors if name is not None]
        return (
            *((FINITE,) if self._watched else ()),
            *measured,
            *((bucket.name for bucket in self.buckets) if measured else ()),
        )

    def layout(self) -> dict[str, Any]:
        """What :meth:`restore` has to know of the ranks' own blobs, as JSON."""
        return {"ranks": self.size, "compression": self.compression.name, "shards": []}

    def restore(
        self,
        workspace: Workspace,
        blobs: Mapping[str, Any],
        layout: Mapping[str, Any],
        own: Callable[[], Mapping[str, Any]],
    ) -> str:
        """Takes back what belongs to this rank alone; call it after :meth:`start`.

        Args:
            workspace: holds everything else already.
            blobs: a checkpoint's, by the names that they have in one process.
            layout: of the ranks that wrote the checkpoint; empty where there were none.
            own: reads the rank's own blobs.

        Returns:
            What is not taken back, and why; empty where nothing is missing.
        """
        there, here = layout.get("compression", "none"), self.compression.name
        if there == here and layout.get("ranks") == self.size:
            kept = own() if self._state else {}
            if all(name in kept and spec_of(kept[name]) == workspace.spec(name) for name in self._state):
                for name in self._state:
                    workspace.feed(name, kept[name])
                return ""
            reason = "its buckets are others"
        elif there != here:
            reason = f"it is of compression {there}, this run has {here}"
        else:
            reason = f"it is of {layout.get('ranks')} ranks, this run has {self.size}"
        if there == "none" or (there == here and not self._state):
            return ""
        return f"what compression {there} kept back is not taken from the checkpoint: {reason}"

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._communicator.size

    @property
    def communicator(self) -> Communicator:
        """What the ranks talk by."""
        return self._communicator

    def start(self, workspace: Workspace) -> None:
        """Gives all ranks the parameters, statistics and training state of rank 0.

        Call it when the init net has run, and after a checkpoint was restored. Nets that differ between
        ranks raise :class:`gpunet.distributed.CollectiveError`, which names the first operator that does.
        """
        specs = {name: workspace.spec(name) for name in self.model.training_blobs()}
        check_same_graph(self._communicator, self.model.init_net)
        check_same_graph(self._communicator, self.model.net, specs)
        for name in [*self.model.training_blobs(), *self._state]:
            value = workspace.value(name)
            if isinstance(value, np.ndarray):
                value = np.array(value, order="C")
                self._communicator.broadcast(value, 0)
                workspace.feed(name, value)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises :class:`gpunet.distributed.CollectiveError` unless all ranks have the same settings: what a
        run depends on and its nets do not tell, as the size of batches, by name.
        """
        check_same_settings(self._communicator, settings)

    def set_weight(self, workspace: Workspace, samples: int, total: int) -> None:
        """Says how many of the samples of a step this rank, or its next micro-batch, has.

        Without it all ranks count alike, whatever their numbers of samples are.
        """
        if not 0 <= samples <= total or total == 0:
            raise ArgumentError(f"{samples} of {total} samples, wanted 0 or more of at least 1")
        workspace.feed(WEIGHT, np.array([samples / total], np.float32))

    def after_step(self, workspace: Workspace) -> None:
        """Notes whether a step was skipped; call it after each run of the net."""
        if self._watched and not workspace.fetch(FINITE).reshape(-1)[0]:
            self.skipped += 1
            log.warning(
                "a sum of gradients overflowed in %s: the step is skipped (%d so far)",
                self.compression.name,
                self.skipped,
            )

    def average_statistics(self, workspace: Workspace) -> None:
        """Gives all ranks the mean of their running statistics, for evaluation and checkpoints.

        With synchronised batch norm they are the same on all ranks, and left alone.
        """
        own = {name for op in self.model.net.proto.op if op.type != "SyncBatchNorm" for name in op.output}
        for name in self.model.statistics:
            if name not in own:
                continue
            value = workspace.fetch(name)
            self._communicator.all_reduce(value, "mean")
            workspace.feed(name, value)

    def verify(self, workspace: Workspace) -> None:
        """Raises :class:`KernelError`, with rank and blob, unless all ranks have the same parameters and
        optimizer state, bit for bit.
        """
        names = [p.name for p in self.model.params] + self.model.state
        digests = [_digest(workspace.fetch(name)) for name in names]
        for rank, found in enumerate(self._communicator.all_gather_object(digests)):
            for name, there, here in zip(names, found, digests, strict=True):
                if there != here:
                    raise KernelError(
                        f"blob {name!r} differs between rank {rank} and rank {self.rank}, wanted the same "
                        "bits on all ranks: did something but the net change it?"
                    )

    def traffic(self, workspace: Workspace | None = None) -> Traffic:
        """Bytes of a step, and, with the workspace that made one, the error of compression in it."""
        sent = sum(self.compression.bytes_sent(bucket) for bucket in self.buckets)
        error: float | None = None
        if isinstance(self.compression, NoCompression):
            error = 0.0
        elif workspace is not None:
            error = self._error(workspace)
        return Traffic(sum(b.nbytes for b in self.buckets), sent, len(self.buckets), error)

    def _error(self, workspace: Workspace) -> float | None:
        lost = whole = 0.0
        for bucket in self.buckets:
            name = self.compression.error(bucket)
            if name is None or workspace.spec(bucket.name) is None:
                return None
            for blob, is_error in ((name, True), (bucket.name, False)):
                values = workspace.fetch(blob).astype(np.float64)
                if is_error:
                    lost += float(values @ values)
                else:
                    whole += float(values @ values)
        return float(np.sqrt(lost / whole)) if whole else 0.0

    def __repr__(self) -> str:
        return (
            f"DataParallel({self.model.name!r}, rank {self.rank} of {self.size}, "
            f"{len(self.buckets)} buckets, {self.compression.name})"
        )


def parallelize(
    model: Model,
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    compression: str | Compressor = "none",
    metrics: Sequence[str] = (),
    accumulate: bool = False,
    communicator: Communicator | None = None,
) -> DataParallel:
    """Rewrites a model that has its gradients, so that they become the mean over all ranks.

    Call it after :meth:`Model.add_gradients` (or :func:`gpunet.mixed_precision.add_scaled_gradients`) and
    before an optimizer is applied.

    Args:
        model: its blob :data:`~gpunet.distributed.buckets.WEIGHT` is this rank's share of the samples,
            ``1 / size`` at first.
        bucket_bytes: a bucket is full when its gradients have as many bytes; by default
            :func:`gpunet.distributed.buckets.bucket_sizes` chooses.
        first_bucket_bytes: the same for the first one, so that reductions begin early.
        compression: a name (:data:`gpunet.distributed.compression.NAMES`) or a compressor of your own.
        metrics: scalar blobs of the forward pass, means over the rank's samples, that become the mean over
            all ranks in the backward pass (the loss, say), behind whatever else reads them.
        accumulate: make :attr:`DataParallel.micro_net` too, for steps of several micro-batches with one
            reduction.
        communicator: the ranks; :func:`gpunet.distributed.world` by default.

    Raises:
        GradientError: the model has no gradients yet, or an optimizer already.
        ArgumentError: a number that makes no sense, or an unknown compression.
    """
    if all(p.gradient is None for p in model.params):
        raise GradientError(
            f"no parameter of model {model.name!r} has a gradient, wanted model.add_gradients(loss) before "
            "parallelize"
        )
    chosen = compressor(compression)
    reductions = Reductions(model, communicator, bucket_bytes, first_bucket_bytes, accumulate=accumulate)
    writer, end = reductions.writer, reductions.end
    buckets = []
    for bucket, position in reductions.fill(model.params):
        buckets.append(bucket)
        reductions.insert(position, writer.reduce(bucket, chosen))
    reductions.add_metrics(metrics)
    for parameter in model.params:
        if isinstance(parameter.gradient, GradientSlice):
            if accumulate:
                raise GradientError(
                    f"the gradient of {parameter.name!r} is sparse, wanted dense ones with accumulate"
                )
            gather = _gather_slices(parameter.gradient)
            reductions.insert(end, [gather])
            parameter.gradient = GradientSlice(*gather.output)
    if chosen.overflows and end == len(reductions.operators) - 1 and buckets:
        reductions.insert(end, _skip_overflow(model, buckets))
    micro_net = reductions.finish()
    return DataParallel(model, buckets, chosen, reductions.communicator, writer.shared, micro_net)


def synchronize_batch_norm(model: Model, communicator: Communicator | None = None) -> None:
    """Rewrites the forward pass: batch normalisation takes mean and variance over the batches of all ranks.

    Call it before :meth:`Model.add_gradients`. Raises :class:`gpunet.errors.NetError` after it.
    """
    ranks = world() if communicator is None else communicator

    def rewrite(op: OperatorDef) -> list[OperatorDef]:
        if op.type != "SpatialBN" or any(arg.name == "is_test" and arg.i for arg in op.arg):
            return [op]
        moments = f"{op.output[0]}_moments"
        result = OperatorDef()
        result.CopyFrom(op)
        result.type = "SyncBatchNorm"
        del result.input[5:]
        result.input.extend([moments, WEIGHT])
        kept = [arg for arg in op.arg if arg.name in ("epsilon", "momentum", "order")]
        del result.arg[:]
        result.arg.extend(kept)
        order = [arg for arg in kept if arg.name == "order"]
        sums = make_operator("SyncBatchNormMoments", [op.input[0]], [moments])
        sums.arg.extend(order)
        reduce = make_operator("Allreduce", [moments], [moments])
        for made in (sums, reduce):
            made.device_option.CopyFrom(op.device_option)
        return [sums, reduce, result]

    add_weight(model, ranks.size)
    model.rewrite_forward(rewrite)


def _gather_slices(gradient: GradientSlice) -> OperatorDef:
    outputs = [f"{blob}_all" for blob in gradient]
    return make_operator("AllgatherSlices", [WEIGHT, *gradient], outputs)


def _skip_overflow(model: Model, buckets: Sequence[Bucket]) -> list[OperatorDef]:
    """Ends the step where a sum is not finite, before anything is updated; on all ranks alike."""
    one = model.add_blob(_ONE, (1,), value=1.0)
    names = [name for bucket in buckets for name in bucket.blobs]
    return [
        make_operator(UNSCALE, [one, *names], [FINITE, *names]),
        make_operator("StopUnless", [FINITE], []),
    ]


def _digest(value: Any) -> str:
    data = value if isinstance(value, np.ndarray) else np.frombuffer(repr(value).encode(), np.uint8)
    head = f"{data.dtype}{data.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(data).tobytes()).hexdigest()[:32]

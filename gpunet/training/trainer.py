"""The training loop: batches in, updates, held-out accuracy after each epoch, checkpoints, a clean end."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gpunet.backends import backend
from gpunet.data import Batches, DatasetError, Prefetcher
from gpunet.devices import CPU
from gpunet.errors import CheckpointError
from gpunet.model import Model
from gpunet.training.checkpoint import Checkpoint, CheckpointFolder, RunState, check_fit, network_hash
from gpunet.training.errors import TrainingError, TrainingInterruptedError
from gpunet.training.evaluation import Evaluator
from gpunet.training.history import Epoch, History, Step, StepLog
from gpunet.training.interrupts import Interrupts
from gpunet.workspace import Workspace

if TYPE_CHECKING:
    from gpunet.distributed.data_parallel import DataParallel


log = logging.getLogger("gpunet")


class Reporter(Protocol):
    """Shows how training goes on."""

    def step(self, step: Step, total: int, samples: int) -> None:
        """A step of ``samples`` samples was made, of ``total`` steps in the run."""

    def epoch(self, epoch: Epoch, total: int) -> None:
        """An epoch of ``total`` ended."""


class Quiet:
    """Shows nothing."""

    def step(self, step: Step, total: int, samples: int) -> None:
        """Nothing."""

    def epoch(self, epoch: Epoch, total: int) -> None:
        """Nothing."""


class Trainer:
    """Trains a model whose gradients and updates are in place.

    Making one runs the model's init net, so the parameters are then as the seed gives them; :meth:`restore`
    goes to where a checkpoint was.

    Args:
        model: has the inputs ``data`` and ``label`` and makes ``softmax``, ``loss`` and ``accuracy``.
        workspace: where to train; holds the parameters afterwards.
        batches: the training data; full batches (``wrap=True``) spare batch normalisation tiny last ones.
        test: held-out images and labels.
        epochs: passes over the data.
        config: what checkpoints must agree in, beside the network and the seed.
        notes: what checkpoints also hold, for whoever resumes the run.
        checkpoints: where to save; ``None`` saves nothing.
        checkpoint_every: steps from one checkpoint to the next; ``None`` saves after each epoch.
        ranks: where several processes train together; the batches are this rank's shard then.
        micro_batches: parts into which each batch is cut, with one update; ``ranks`` must gather them.
        verify_every: steps from one check to the next that all ranks have the same parameters; 0 for none.
        network: the network hash of the model before it was rewritten for several ranks.
        seed: of the run, where this rank's workspace has another one.
        prefetch: threads that prepare batches ahead; 0 prepares each when it is needed.

    Raises:
        TrainingError: a number of epochs or steps that makes no sense.
    """

    def __init__(
        self,
        model: Model,
        workspace: Workspace,
        batches: Batches,
        test: tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]],
        *,
        epochs: int,
        config: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        checkpoints: CheckpointFolder | None = None,
        checkpoint_every: int | None = None,
        ranks: DataParallel | None = None,
        micro_batches: int = 1,
        verify_every: int = 0,
        network: str | None = None,
        seed: int | None = None,
        prefetch: int = 0,
    ) -> None:
        samples = len(batches.labels)
        if epochs < 1:
            raise TrainingError(f"{epochs} epochs, wanted at least 1")
        if batches.batch_size > samples:
            raise TrainingError(
                f"batch size {batches.batch_size}, wanted at most the {samples} training samples"
            )
        if checkpoint_every is not None and checkpoint_every < 1:
            raise TrainingError(f"a checkpoint every {checkpoint_every} steps, wanted at least 1")
        micro_net = None if ranks is None else ranks.micro_net
        if micro_batches < 1 or (micro_batches > 1 and micro_net is None):
            raise TrainingError(
                f"{micro_batches} micro-batches, wanted 1, or more with gradients that accumulate"
            )
        self.model, self.workspace, self.epochs = model, workspace, epochs
        self.history = History()
        self._batches, self._test = batches, test
        device = None if workspace.device == CPU else backend(workspace.device)
        self._ahead = Prefetcher(batches, prefetch, device=device)
        self._config, self._notes = dict(config or {}), dict(notes or {})
        self._checkpoints, self._checkpoint_every = checkpoints, checkpoint_every
        self._reporter: Reporter = Quiet()
        self._ranks, self._micro_batches, self._verify_every = ranks, micro_batches, verify_every
        self._seed = workspace.seed if seed is None else seed
        workspace.run_once(model.init_net)
        rates = [op.output[0] for op in model.net.proto.op if op.type == "LearningRate"]
        self._rate = rates[0] if rates else None
        # Passes may do as they like with everything else that the net makes for itself.
        keep = ["loss", "accuracy", *rates, *(() if ranks is None else ranks.kept_blobs)]
        if ranks is None:
            self._net = workspace.create(model.net, overwrite=True, keep=keep)
        else:
            ranks.check_settings(
                {
                    **self._config,
                    "epochs": epochs,
                    "batch-size": batches.batch_size,
                    "seed": self._seed,
                    "micro-batches": micro_batches,
                    "verify-every": verify_every,
                    "checkpoint-every": None if checkpoints is None else checkpoint_every,
                    "checkpoints": checkpoints is not None,
                }
            )
            ranks.start(workspace)
            # One lane computes, the other one communicates.
            self._net = workspace.create(
                model.net, overwrite=True, engine="async_scheduling", workers=1, keep=keep
            )
        self._micro_net = None
        if micro_net is not None:
            known = {name for op in micro_net.op for name in (*op.input, *op.output)}
            there = [name for name in keep if name in known]
            self._micro_net = workspace.create(micro_net, overwrite=True, keep=there)
        self._evaluator = Evaluator(model, workspace)
        self._single = network

    @property
    def ranks(self) -> DataParallel | None:
        """The processes that train together; ``None`` in one alone."""
        return self._ranks

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before it was resumed included."""
        return steps_of(len(self._batches.labels), self._batches.batch_size, self.epochs)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return len(self.history.epochs) >= self.epochs

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes to where the checkpoint was made.

        Raises:
            CheckpointError: it belongs to another run (the message says what differs); nothing is changed
                then.
        """
        ranks, state = self._ranks, checkpoint.state
        names = self.model.training_blobs()
        check_fit(
            checkpoint,
            self._config,
            self._network(),
            self._seed,
            self.model,
            self.workspace,
            names if ranks is None else ranks.training_blobs,
        )
        self._ahead.close()
        try:
            self._batches.restore(state.data)
        except DatasetError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
        for name in names:
            self.workspace.feed(name, checkpoint.blobs[name])
        self.workspace.restore_steps(dict(state.random_steps))
        self.history = state.history
        if ranks is not None:
            ranks.start(self.workspace)
            lost = ranks.restore(
                self.workspace, checkpoint.blobs, state.layout, lambda: checkpoint.own(ranks.rank)
            )
            if lost and ranks.rank == 0:
                log.warning("%s", lost)
        elif state.layout.get("compression", "none") != "none":
            log.warning(
                "what compression %s kept back is not taken from the checkpoint: this run has one process",
                state.layout["compression"],
            )

    def run(self, log: StepLog | None = None, reporter: Reporter | None = None) -> History:
        """Trains until all epochs are done, and returns what was measured.

        Args:
            log: gets a line for each step.
            reporter: shows progress.

        Raises:
            TrainingError: the loss is not finite any more.
            TrainingInterruptedError: SIGINT, SIGTERM or SIGUSR1 came, to any rank; a checkpoint was written.
        """
        self._reporter = reporter or Quiet()
        with Interrupts() as interrupts, closing(self._ahead):
            seconds, samples = 0.0, 0
            while not self.finished:
                start = time.perf_counter()
                step, size = self.make_step()
                seconds += time.perf_counter() - start
                samples += size
                if log is not None:
                    log.write(step)
                self._reporter.step(step, self.total_steps, size)
                ended = self._batches.epoch >= step.epoch
                if ended:
                    self._end_epoch(step.epoch, samples / max(seconds, 1e-9))
                    seconds, samples = 0.0, 0
                caught = self._agree(interrupts.caught)
                if caught is not None and not self.finished:
                    self._stop(caught)
                if self._is_due(step.step, ended):
                    self.save()
        return self.history

    def save(self) -> None:
        """Writes a checkpoint, where there is a folder for them; of several ranks, rank 0 does.

        Raises:
            CheckpointError: it could not be written; on all ranks.
        """
        if self._checkpoints is None:
            return
        if self._ranks is None:
            self._checkpoints.save(self._state(), self.model, self.workspace)
            return
        self._ranks.average_statistics(self.workspace)
        layout = self._save_parts(self._ranks, self._checkpoints)
        problem = ""
        if self._ranks.rank == 0:
            try:
                self._checkpoints.save(self._state(layout), self.model, self.workspace)
            except (OSError, CheckpointError) as error:
                problem = f"rank 0 could not write a checkpoint: {error}"
        # The others wait here: nobody goes on, or ends, before it is whole.
        problem = self._ranks.communicator.broadcast_object(problem)
        if problem:
            raise CheckpointError(problem)

    def _save_parts(self, ranks: DataParallel, checkpoints: CheckpointFolder) -> dict[str, Any]:
        """Lets each rank write what it has for itself; returns the layout of that."""
        own = ranks.own_blobs
        if not own:
            return {}
        token = ranks.communicator.broadcast_object(secrets.token_hex(8))
        layout = {**ranks.layout(), "own": list(own), "token": token}
        problem = ""
        try:
            checkpoints.save_part(len(self.history.steps), ranks.rank, layout, self.workspace)
        except (OSError, CheckpointError) as error:
            problem = f"rank {ranks.rank} could not write its part of a checkpoint: {error}"
        problems = [found for found in ranks.communicator.all_gather_object(problem) if found]
        if problems:
            raise CheckpointError(problems[0])
        return layout

    def make_step(self) -> tuple[Step, int]:
        """Makes one update; returns what was measured, and the number of its samples on all ranks.

        Raises:
            TrainingError: the loss is not finite any more.
            DatasetError: the batch could not be prepared.
        """
        epoch, number = self._batches.epoch + 1, len(self.history.steps) + 1
        images, labels = self._ahead.next_batch()
        total = self._batches.last_size
        begin = 0
        for index, part in enumerate(np.array_split(labels, self._micro_batches)):
            last, end = index == self._micro_batches - 1, begin + len(part)
            self._run(images[begin:end], part, total, last=last)
            begin = end
        if self._ranks is not None:
            self._ranks.after_step(self.workspace)
            if self._verify_every and number % self._verify_every == 0:
                self._ranks.verify(self.workspace)
        # Some updates add their step, and have a negative rate.
        # There is none before the first update: in float16, first steps may be skipped.
        known = self._rate if self._rate and self.workspace.has(self._rate) else None
        rate = abs(self._number(known)) if known else math.nan
        step = Step(number, epoch, self._number("loss"), self._number("accuracy"), rate)
        if not math.isfinite(step.loss):
            raise TrainingError(
                f"the loss is {step.loss} at step {number} (epoch {epoch}) with learning rate {rate:g}: "
                "training has diverged, wanted a finite loss; try a smaller learning rate, or clip gradients"
            )
        self.history.steps.append(step)
        return step, total

    def _run(
        self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int32], total: int, *, last: bool
    ) -> None:
        """One batch, or one micro-batch of it; an update behind the last one."""
        workspace = self.workspace
        if self._ranks is not None:
            self._ranks.set_weight(workspace, len(labels), total)
        self._ahead.feed(workspace, "data", images)
        self._ahead.feed(workspace, "label", labels)
        workspace.run(self._net if last or self._micro_net is None else self._micro_net)

    def _agree(self, caught: int | None) -> int | None:
        """The signal that any rank has caught."""
        if self._ranks is None or self._ranks.size == 1:
            return caught
        number = np.array([caught or 0], np.int64)
        self._ranks.communicator.all_reduce(number, "max")
        return int(number[0]) or None

    def _number(self, blob: str) -> float:
        return float(self.workspace.fetch(blob).reshape(-1)[0])

    def _end_epoch(self, epoch: int, speed: float) -> None:
        if self._ranks is None:
            score = self._evaluator.score(*self._test)
        else:
            self._ranks.average_statistics(self.workspace)
            score = self._evaluator.score_together(*self._test, self._ranks.communicator)
        steps = self.history.steps_of(epoch)
        loss, accuracy = (float(np.mean([getattr(s, what) for s in steps])) for what in ("loss", "accuracy"))
        self.history.epochs.append(Epoch(epoch, loss, accuracy, score.loss, score.accuracy, speed))
        self._reporter.epoch(self.history.epochs[-1], self.epochs)

    def _is_due(self, step: int, epoch_ended: bool) -> bool:
        if self._checkpoint_every is None:
            return epoch_ended
        return step % self._checkpoint_every == 0 or self.finished

    def _stop(self, number: int) -> None:
        self.save()
        kept = f"; a checkpoint is in {self._checkpoints.path}" if self._checkpoints else ""
        raise TrainingInterruptedError(
            f"interrupted after step {len(self.history.steps)} of {self.total_steps}{kept}", number
        )

    def _network(self) -> str:
        return network_hash(self.model) if self._single is None else self._single

    def _state(self, layout: Mapping[str, Any] | None = None) -> RunState:
        return RunState(
            config=self._config,
            network=self._network(),
            step=len(self.history.steps),
            finished=self.finished,
            seed=self._seed,
            random_steps=self.workspace.steps(),
            data=self._batches.state(),
            history=self.history,
            notes=self._notes,
            layout=layout or {},
        )


def steps_of(samples: int, batch_size: int, epochs: int) -> int:
    """Batches that start in the first ``epochs`` epochs, where they wrap around from one to the next."""
    return -(-samples * epochs // batch_size)

"""``gpunet train``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunet.cli import Command
from gpunet.cli.nets import detect_nan_option

if TYPE_CHECKING:
    from rich.console import Console

    from gpunet.data import Dataset
    from gpunet.distributed import Communicator
    from gpunet.training import Checkpoint, CheckpointFolder, Trainer


@click.command(cls=Command)
@click.argument("model")
@click.option(
    "--data",
    metavar="digits|DIR",
    help="The digits that come with gpunet (the default), or a folder with MNIST's IDX files.",
)
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Passes over the training images.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Images a step.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Highest learning rate; it falls along half a cosine.",
)
@click.option(
    "--momentum",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="X",
    help="Share of the last update that is kept.",
)
@click.option("--weight-decay", type=click.FloatRange(min=0), metavar="X", help="Decay of the weights.")
@click.option(
    "--clip-norm",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Greatest norm of all gradients together; 0 does not clip.",
)
@click.option(
    "--max-shift",
    type=click.IntRange(min=0),
    metavar="N",
    help="Shift training images by up to N pixels at random.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adagrad", "adadelta", "rmsprop", "adam", "lars", "lamb"]),
    help="What updates parameters (default sgd).",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="The half types keep parameters in float32; float16 scales the loss, skipping steps that overflow.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:N, sim:N, or auto.")
@click.option("--seed", type=int, metavar="N", help="Seed of all random numbers (default 0).")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the model and the checkpoints (default runs/MODEL-DATA).",
)
@click.option(
    "--resume", is_flag=True, help="Go on from the last checkpoint in the folder, with its settings."
)
@click.option("--overwrite", is_flag=True, help="Start anew although the folder holds an unfinished run.")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps between checkpoints (default: one each epoch).",
)
@click.option(
    "--prefetch",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Threads that prepare batches ahead.",
)
@click.option(
    "--compression",
    default="none",
    show_default=True,
    metavar="NAME",
    help="Of gradients between ranks: none, float16, float16+feedback, bfloat16, bfloat16+feedback, "
    "powersgd:RANK, topk:RATIO:MOMENTUM.",
)
@click.option(
    "--bucket-mib",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Gradients that are reduced together, in MiB (default: an eighth of them, and at most 25).",
)
@click.option("--shard-optimizer", is_flag=True, help="Keep on each rank one part of the optimizer's state.")
@click.option(
    "--sync-batch-norm/--no-sync-batch-norm",
    default=True,
    show_default=True,
    help="Batch normalization over the batches of all ranks.",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Parts into which each rank's batch is cut.",
)
@click.option(
    "--verify-every",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Steps between checks that all ranks have the same parameters; 0 for none.",
)
@detect_nan_option
def command(
    model: str,
    data: str | None,
    device: str,
    seed: int | None,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    checkpoint_every: int | None,
    prefetch: int,
    detect_nan: bool,
    compression: str,
    bucket_mib: float | None,
    shard_optimizer: bool,
    sync_batch_norm: bool,
    micro_batches: int,
    verify_every: int,
    **changes: Any,
) -> None:
    """Train MODEL (lenet, mlp or resnet20) to classify images.

    Settings that are not given are those that suit the model. The folder gets the trained model
    (init_net.pb, predict_net.pb), a log of all steps (steps.csv), a picture of the course of training
    (curve.png, if matplotlib is installed) and the last two checkpoints.

    Ctrl-C saves a checkpoint; --resume goes on from it, with the same result as if nothing had happened.

    Under mpirun, srun or gpunet launch, all processes train together: each takes its share of every batch,
    and the first one prints and writes. A run can be resumed with another number of processes.
    """
    from rich.console import Console

    from gpunet import nan_check
    from gpunet.data import load_dataset
    from gpunet.distributed import discover, init, local_device
    from gpunet.training import CheckpointFolder, Ranks, Settings, TrainingInterruptedError, make_trainer

    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other")
    Settings.of(model)
    place = discover()
    where = device if place.size == 1 else local_device(device, place)
    job = init("auto", None if place.size == 1 else where)
    first = job.rank == 0
    console = Console(quiet=not first)
    folder = out or Path("runs") / f"{model}-{Path(data or 'digits').resolve().name}"
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoint = _agreed_checkpoint(job, checkpoints, resume, overwrite)
    if resume and checkpoint is None:
        console.print(f"no checkpoint in {checkpoints.path}: starting at the beginning", highlight=False)
    if checkpoint is not None:
        config, notes = checkpoint.state.config, checkpoint.state.notes
        changes = {
            name: config.get(name.replace("_", "-")) if value is None else value
            for name, value in changes.items()
        }
        seed = config.get("seed") if seed is None else seed
        data = notes.get("data") if data is None else data
    dataset = load_dataset(data or "digits")
    ranks = Ranks(compression, bucket_mib, sync_batch_norm, micro_batches, verify_every, shard_optimizer)
    trainer = make_trainer(
        Settings.of(model, seed or 0, **changes),
        dataset,
        device=where,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        notes={"data": str(Path(data).resolve()) if data and dataset.name != "digits" else "digits"},
        ranks=ranks if job.size > 1 or micro_batches > 1 or shard_optimizer else None,
        prefetch=prefetch,
    )
    if detect_nan:
        nan_check.watch(trainer.workspace)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    elif first:
        checkpoints.clear()
    _announce(console, trainer, dataset)
    start = time.perf_counter()
    if not first:
        try:
            trainer.run()
        except TrainingInterruptedError as interrupted:
            # Rank 0 says so.
            raise SystemExit(interrupted.exit_code) from None
        return
    _run(console, trainer, folder)
    _finish(console, trainer, dataset, folder, time.perf_counter() - start)


def _run(console: Console, trainer: Trainer, folder: Path) -> None:
    """Trains, with a log of the steps and a report on the console."""
    from gpunet.training import StepLog
    from gpunet.training.report import ConsoleReporter

    folder.mkdir(parents=True, exist_ok=True)
    with (
        StepLog(folder / "steps.csv", trainer.history.steps) as log,
        ConsoleReporter(console, trainer.total_steps, len(trainer.history.steps)) as reporter,
    ):
        trainer.run(log, reporter)


def _agreed_checkpoint(
    job: Communicator, checkpoints: CheckpointFolder, resume: bool, overwrite: bool
) -> Checkpoint | None:
    """The checkpoint that rank 0 finds, on all ranks; an error there is one on all ranks."""
    from gpunet.errors import CheckpointError
    from gpunet.training import TrainingError, read_checkpoint

    if job.size == 1:
        return _find_checkpoint(checkpoints, resume, overwrite)
    found, path, problem = None, None, None
    if job.rank == 0:
        try:
            found = _find_checkpoint(checkpoints, resume, overwrite)
            path = None if found is None else str(found.path.resolve())
        except (CheckpointError, TrainingError, OSError) as error:
            problem = str(error)
    path, problem = job.broadcast_object([path, problem])
    if problem is not None:
        raise CheckpointError(problem)
    if path is None or job.rank == 0:
        return found
    try:
        return read_checkpoint(path)
    except OSError as error:
        raise CheckpointError(
            f"rank {job.rank} cannot read the checkpoint {path} that rank 0 found ({error.strerror}), "
            "wanted a folder that all hosts see"
        ) from None


def _find_checkpoint(checkpoints: CheckpointFolder, resume: bool, overwrite: bool) -> Checkpoint | None:
    """The checkpoint to go on from; an error if it is unclear whether to, or if the run could not write."""
    from gpunet.errors import CheckpointError
    from gpunet.training.outputs import check_outputs

    check_outputs(checkpoints.path.parent)
    if overwrite:
        return None
    try:
        found = checkpoints.latest()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; --overwrite starts over") from None
    if found is None or resume:
        return found
    if not found.state.finished:
        raise CheckpointError(
            f"{found.path} is of a run that did not finish: --resume goes on with it, "
            "--overwrite starts over, --out takes another folder"
        )
    return None


def _announce(console: Console, trainer: Trainer, dataset: Dataset) -> None:
    channels, height, width = dataset.train_images.shape[1:]
    numbers = sum(trainer.workspace.fetch(name).size for name in trainer.model.saved_blobs())
    console.print(
        f"{trainer.model.name}: {numbers:,} parameters; {dataset.name}: "
        f"{len(dataset.train_labels):,} images of {channels}x{height}x{width} to train on, "
        f"{len(dataset.test_labels):,} held out; device {trainer.workspace.device}{_ranks_of(trainer)}",
        highlight=False,
        soft_wrap=True,
    )
    done = len(trainer.history.steps)
    if done:
        console.print(f"going on after step {done} of {trainer.total_steps}", highlight=False)


def _ranks_of(trainer: Trainer) -> str:
    """How many processes train, and what they send each other."""
    from gpunet.distributed.sharding import ShardedOptimizer

    ranks = trainer.ranks
    if ranks is None or ranks.size == 1:
        return ""
    traffic = ranks.traffic()
    shared = ""
    if isinstance(ranks, ShardedOptimizer):
        here, whole = ranks.state_bytes()
        shared = f"; {_bytes(here)} of optimizer state on each instead of {_bytes(whole)}"
    return (
        f" on each of {ranks.size} ranks; {_bytes(traffic.sent_bytes)} of gradients a step in "
        f"{traffic.buckets} bucket{'' if traffic.buckets == 1 else 's'}, compression "
        f"{ranks.compression.name} ({traffic.ratio:.1f}x){shared}"
    )


def _bytes(size: int) -> str:
    """A number of bytes, in a unit that leaves some digits before the point."""
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def _lost_by(trainer: Trainer) -> str:
    """What compression did to the gradients."""
    ranks = trainer.ranks
    error = None if ranks is None else ranks.traffic(trainer.workspace).error
    if ranks is None or not error:
        return ""
    return (
        f"; compression {ranks.compression.name} kept back {100 * error:.2g}% of the norm of this rank's "
        f"gradients in the last step, {ranks.skipped} steps skipped"
    )


def _finish(console: Console, trainer: Trainer, dataset: Dataset, folder: Path, seconds: float) -> None:
    """Saves the model and the curve, and prints the table."""
    from gpunet.export import save_model
    from gpunet.training.curve import INSTALL_HINT, can_draw, save_curve
    from gpunet.training.report import summary

    history = trainer.history
    save_model(folder, trainer.model, trainer.workspace, "softmax")
    console.print(summary(history, len(dataset.test_labels)))
    lines = [f"{history.steps[-1].step} steps, {seconds:.1f} s{_lost_by(trainer)}", f"model: {folder}"]
    if can_draw():
        save_curve(folder / "curve.png", history, f"{trainer.model.name} on {dataset.name}")
        lines.append(f"curve: {folder / 'curve.png'}")
    else:
        lines.append(f"for a picture of the course of training: {INSTALL_HINT}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

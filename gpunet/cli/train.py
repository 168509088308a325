"""``gpunet train``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunet.cli import Command

if TYPE_CHECKING:
    from rich.console import Console

    from gpunet.data import Dataset
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
@click.option("--detect-nan", is_flag=True, help="Stop at the first output with NaN or infinity (slow).")
def command(
    model: str,
    data: str | None,
    device: str,
    seed: int | None,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    checkpoint_every: int | None,
    detect_nan: bool,
    **changes: Any,
) -> None:
    """Train MODEL (lenet, mlp or resnet20) to classify images.

    Settings that are not given are those that suit the model. The folder gets the trained model
    (init_net.pb, predict_net.pb), a log of all steps (steps.csv), a picture of the course of training
    (curve.png, if matplotlib is installed) and the last two checkpoints.

    Ctrl-C saves a checkpoint; --resume goes on from it, with the same result as if nothing had happened.
    """
    from rich.console import Console

    from gpunet import nan_check
    from gpunet.data import load_dataset
    from gpunet.training import CheckpointFolder, Settings, StepLog, make_trainer
    from gpunet.training.report import ConsoleReporter

    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other")
    Settings.of(model)
    console = Console()
    folder = out or Path("runs") / f"{model}-{Path(data or 'digits').resolve().name}"
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoint = _find_checkpoint(checkpoints, resume, overwrite)
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
    trainer = make_trainer(
        Settings.of(model, seed or 0, **changes),
        dataset,
        device=device,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        notes={"data": str(Path(data).resolve()) if data and dataset.name != "digits" else "digits"},
    )
    if detect_nan:
        nan_check.watch(trainer.workspace)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    else:
        checkpoints.clear()
    folder.mkdir(parents=True, exist_ok=True)
    _announce(console, trainer, dataset)
    with (
        StepLog(folder / "steps.csv", trainer.history.steps) as log,
        ConsoleReporter(console, trainer.total_steps, len(trainer.history.steps)) as reporter,
    ):
        start = time.perf_counter()
        trainer.run(log, reporter)
        seconds = time.perf_counter() - start
    _finish(console, trainer, dataset, folder, seconds)


def _find_checkpoint(checkpoints: CheckpointFolder, resume: bool, overwrite: bool) -> Checkpoint | None:
    """The checkpoint to go on from; an error if it is unclear whether to."""
    from gpunet.errors import CheckpointError

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
        f"{len(dataset.test_labels):,} held out; device {trainer.workspace.device}",
        highlight=False,
        soft_wrap=True,
    )
    done = len(trainer.history.steps)
    if done:
        console.print(f"going on after step {done} of {trainer.total_steps}", highlight=False)


def _finish(console: Console, trainer: Trainer, dataset: Dataset, folder: Path, seconds: float) -> None:
    """Saves the model and the curve, and prints the table."""
    from gpunet.export import save_model
    from gpunet.training.curve import INSTALL_HINT, can_draw, save_curve
    from gpunet.training.report import summary

    history = trainer.history
    save_model(folder, trainer.model, trainer.workspace, "softmax")
    console.print(summary(history, len(dataset.test_labels)))
    lines = [f"{history.steps[-1].step} steps, {seconds:.1f} s", f"model: {folder}"]
    if can_draw():
        save_curve(folder / "curve.png", history, f"{trainer.model.name} on {dataset.name}")
        lines.append(f"curve: {folder / 'curve.png'}")
    else:
        lines.append(f"for a picture of the course of training: {INSTALL_HINT}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

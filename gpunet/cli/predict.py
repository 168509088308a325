"""``gpunet predict``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpunet.cli import Command
from gpunet.cli.nets import detect_nan_option

if TYPE_CHECKING:
    import numpy.typing as npt

    from gpunet.export import LoadedModel


@click.command(cls=Command)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("images", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="IMAGE_OR_NPY...")
@click.option("--top", type=click.IntRange(min=1), default=3, show_default=True, help="Classes to print.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:N, sim:N, or auto.")
@detect_nan_option
def command(model: Path, images: tuple[Path, ...], top: int, device: str, detect_nan: bool) -> None:
    """Print the most probable classes of images.

    MODEL is the folder of a saved model, or its predict net. Pictures (PNG, JPEG, ...) are scaled to
    the size that the model wants; .npy files hold one image [H, W] or [C, H, W], or many
    [N, C, H, W]. Pixels of 8 and 16 bits are scaled to 0..1, other arrays are taken as they are. Scores
    that do not add up to 1 are printed as numbers.
    """
    import numpy as np

    from gpunet import nan_check
    from gpunet.data import load_image
    from gpunet.errors import KernelError, ShapeError
    from gpunet.export import Predictor, load_model

    loaded = load_model(model)
    predictor = Predictor(loaded, device)
    if detect_nan:
        nan_check.watch(predictor.workspace)
    wanted = _image_shape(loaded)
    for path in images:
        if wanted is None:
            batch = load_image(path)
        else:
            channels = wanted[0] if wanted[0] in (1, 3) else None
            batch = load_image(path, channels=channels, size=wanted[1:])
            if batch.shape[1:] != wanted:
                raise ShapeError(f"{path}: images of shape {batch.shape[1:]}, the model wants {wanted}")
        scores = predictor.run([batch])[loaded.outputs[0]]
        scores = scores.reshape(len(batch), -1)
        for index, row in enumerate(scores):
            name = str(path) if len(scores) == 1 else f"{path}[{index}]"
            bad = row.size - int(np.isfinite(row).sum())
            if bad:
                pixels = batch[index].size - int(np.isfinite(batch[index]).sum())
                raise KernelError(
                    f"{name}: {bad} of {row.size} scores are NaN or infinite, wanted finite ones; so are "
                    f"{pixels} of {batch[index].size} pixels (--detect-nan names the operator that made them)"
                )
            click.echo(f"{name}: {_best(row, top)}")


def _image_shape(model: LoadedModel) -> tuple[int, int, int] | None:
    """Channels, height and width that the model wants; ``None`` where it does not tell."""
    from gpunet.errors import NetError

    if len(model.inputs) != 1:
        raise NetError(
            f"{model.path}: the model has inputs {', '.join(model.inputs) or 'none'}, wanted one, for images"
        )
    spec = model.value_info.get(model.inputs[0])
    if spec is None:
        return None
    if spec.rank != 4:
        raise NetError(f"{model.path}: the input {model.inputs[0]!r} is {spec}, wanted images NxCxHxW")
    _, channels, height, width = spec.shape
    return channels, height, width


def _best(row: npt.NDArray[Any], top: int) -> str:
    order = (-row).argsort(kind="stable")[:top]
    # Outputs of a net without a softmax at its end are no shares of 100 %.
    form = ".2%" if row.min() >= 0 and abs(float(row.sum(dtype=float)) - 1) < 0.01 else ".4g"
    return "  ".join(f"class {i} {row[i]:{form}}" for i in order)

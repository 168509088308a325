"""The folder that a run writes to, looked at before hours are spent on what then cannot be saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from gpunet.training.errors import TrainingError

#: What a run writes there: folders, and files.
FOLDERS: Final = ("checkpoints",)
FILES: Final = (
    "steps.csv",
    "init_net.pb",
    "init_net.pbtxt",
    "predict_net.pb",
    "predict_net.pbtxt",
    "value_info.json",
    "curve.png",
)


def check_outputs(folder: Path) -> None:
    """Raises :class:`TrainingError` where something in the way, or a missing right, keeps a run from writing
    to ``folder``. What is not there yet is made later.
    """
    for path in (*reversed(folder.parents), folder, *(folder / name for name in FOLDERS)):
        if path.exists() and not path.is_dir():
            raise TrainingError(f"{path} is a file, wanted a folder (--out takes another one)")
    for path in (folder / name for name in FILES):
        if path.is_dir():
            raise TrainingError(f"{path} is a folder, wanted a file or nothing (--out takes another folder)")
    for path in (folder, *(folder / name for name in FOLDERS)):
        place = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not os.access(place, os.W_OK | os.X_OK):
            raise TrainingError(f"{place} cannot be written to, wanted a folder that can (--out takes one)")

"""What each of several ranks has for itself, in files beside a checkpoint: its part of shared optimizer
state, and what compression keeps back.

Such a file is named after the checkpoint, the rank and a random token,
``step-00000012.rank-1-of-4.<token>.part``, and is whole before the checkpoint that names the token is
written. So a job that dies in between leaves the older checkpoints as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpunet.errors import CheckpointError, DataTypeError
from gpunet.training.records import read_records, write_records
from gpunet.workspace import Workspace

#: Names of these files, and of what is left of one that was being written.
NAME: Final = re.compile(r"step-(\d{8,})\.rank-\d+-of-\d+\.([0-9a-f]+)\.part")
LEFT_OVER: Final = re.compile(r"\.step-\d{8,}\.rank-.*\.part\.[0-9a-f]+\.tmp")


def part_path(checkpoint: Path, rank: int, layout: Mapping[str, Any]) -> Path:
    """The file of a rank beside a checkpoint of this layout."""
    ranks, token = layout.get("ranks"), layout.get("token")
    return checkpoint.with_name(f"{checkpoint.stem}.rank-{rank}-of-{ranks}.{token}.part")


def write_part(checkpoint: Path, rank: int, layout: Mapping[str, Any], workspace: Workspace) -> None:
    """Writes the blobs ``layout["own"]`` of a rank.

    Raises:
        CheckpointError: a blob is of a kind that cannot be stored.
        OSError: the file cannot be written.
    """
    path = part_path(checkpoint, rank, layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = layout["own"]
    try:
        write_records(path, {"rank": rank}, ((name, workspace.fetch(name)) for name in names))
    except DataTypeError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None


def read_part(checkpoint: Path, rank: int, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The blobs of a rank.

    Raises:
        CheckpointError: the file is missing or damaged, or lacks a blob.
    """
    path = part_path(checkpoint, rank, layout)
    try:
        _, blobs = read_records(path)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} has parts of {layout.get('ranks')} ranks, and {path.name} cannot be "
            f"read ({error.strerror})"
        ) from None
    missing = [name for name in layout["own"] if name not in blobs]
    if missing:
        raise CheckpointError(f"checkpoint {path} lacks blob {missing[0]!r}")
    return blobs


def check_layout(layout: Mapping[str, Any]) -> None:
    """Raises :class:`CheckpointError` unless a layout is whole, or empty."""
    if not layout:
        return
    wanted: dict[str, type] = {"ranks": int, "compression": str, "shards": list, "own": list, "token": str}
    for key, kind in wanted.items():
        if type(layout.get(key)) is not kind:
            raise CheckpointError(
                f"the entry 'layout' of the metadata has {key!r} {layout.get(key)!r:.60}, wanted a JSON "
                f"{kind.__name__}"
            )


def whole_state(checkpoint: Path, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer state that ranks share, put together for whole parameters; nothing where they share none.

    Raises:
        CheckpointError: a part is missing, damaged, or of another size.
    """
    if not layout or not layout["shards"]:
        return {}
    from gpunet.distributed.sharding import split_state

    parts = [read_part(checkpoint, rank, layout) for rank in range(layout["ranks"])]
    found: dict[str, Any] = {}
    for shard in layout["shards"]:
        shapes = [tuple(shape) for shape in shard["shapes"]]
        for name, wholes in shard["state"].items():
            row = np.concatenate([np.reshape(part[name], -1) for part in parts])
            try:
                found.update(split_state(row, wholes, shapes))
            except ValueError as error:
                raise CheckpointError(f"checkpoint {checkpoint}: parts of {name!r}: {error}") from None
    return found

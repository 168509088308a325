"""Checkpoints: everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from gpunet.errors import CheckpointError, DataTypeError
from gpunet.model import Model
from gpunet.serialization import AnyPath
from gpunet.specs import TensorSpec
from gpunet.training.history import History
from gpunet.training.parts import LEFT_OVER as PART_LEFT_OVER
from gpunet.training.parts import NAME as PART_NAME
from gpunet.training.parts import check_layout, read_part, whole_state, write_part
from gpunet.training.records import read_records, write_records
from gpunet.workspace import Workspace

log = logging.getLogger("gpunet")
T = TypeVar("T")

_NAME: Final = re.compile(r"step-(\d{8,})\.checkpoint")
_LEFT_OVER: Final = re.compile(r"\.step-\d{8,}\.checkpoint\.[0-9a-f]+\.tmp")


@dataclass(frozen=True)
class RunState:
    """Where a run is, apart from its blobs.

    Attributes:
        config: the settings that make the run what it is, by name; a run goes on only under equal ones.
        network: what :func:`network_hash` says of its model.
        step: updates made.
        finished: whether no more are wanted.
        seed: of the run: that of rank 0's workspace.
        random_steps: ``Workspace.steps()``.
        data: ``Batches.state()``.
        history: what was measured.
        notes: anything else about the run that its next start wants to know; not compared.
        layout: of the files in which ranks have blobs of their own (:mod:`gpunet.training.parts`); empty
            without such files.
    """

    config: Mapping[str, Any]
    network: str
    step: int
    finished: bool
    seed: int
    random_steps: Mapping[str, int]
    data: Mapping[str, int]
    history: History
    notes: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and is whole: the state of a run and the blobs by name."""

    path: Path
    state: RunState
    blobs: Mapping[str, Any]

    def own(self, rank: int) -> dict[str, Any]:
        """What one of the ranks that wrote it had for itself; raises :class:`CheckpointError`."""
        return read_part(self.path, rank, self.state.layout)


def network_hash(model: Model) -> str:
    """SHA-256 (hex) of a model's two nets: layers, shapes, fills, optimizer and schedule."""
    digest = hashlib.sha256()
    for net in (model.init_net.proto, model.net.proto):
        data = net.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def write_checkpoint(path: AnyPath, state: RunState, model: Model, workspace: Workspace) -> None:
    """Writes the run's state and all blobs that training changes, atomically.

    Raises:
        CheckpointError: a blob is of a kind that cannot be stored.
        BlobError: a blob does not exist yet.
        OSError: the file cannot be written; what was there is left.
    """
    metadata = {
        "config": dict(state.config),
        "network": state.network,
        "step": state.step,
        "finished": state.finished,
        "seed": state.seed,
        "random_steps": dict(state.random_steps),
        "data": dict(state.data),
        "history": state.history.to_json(),
        "notes": dict(state.notes),
        "layout": dict(state.layout),
    }
    names = model.training_blobs()
    try:
        write_records(path, metadata, ((name, workspace.fetch(name)) for name in names))
    except DataTypeError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from None


def read_checkpoint(path: AnyPath) -> Checkpoint:
    """Reads a checkpoint, with the optimizer state that ranks shared put together, and checks all that can be
    checked without a model.

    Raises:
        CheckpointError: it is damaged, cut off, something else, or of another version of the format.
        OSError: it cannot be read.
    """
    metadata, blobs = read_records(path)
    try:
        state = RunState(
            config=_get(metadata, "config", dict),
            network=_get(metadata, "network", str),
            step=_get(metadata, "step", int),
            finished=_get(metadata, "finished", bool),
            seed=_get(metadata, "seed", int),
            random_steps=_numbers(metadata, "random_steps"),
            data=_numbers(metadata, "data"),
            history=History.from_json(_get(metadata, "history", dict)),
            notes=_get(metadata, "notes", dict),
            layout=_get(metadata, "layout", dict),
        )
        check_layout(state.layout)
        blobs |= whole_state(Path(path), state.layout)
    except CheckpointError as error:
        raise error.locate(f"checkpoint {path}") from None
    return Checkpoint(Path(path), state, blobs)


def check_fit(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    network: str,
    seed: int,
    model: Model,
    workspace: Workspace,
    names: Sequence[str],
) -> None:
    """Raises :class:`CheckpointError`, naming what differs, unless the checkpoint belongs to this run.

    ``network`` is :func:`network_hash` of the model, before it was rewritten for several ranks, and ``seed``
    that of the run. The workspace must have run the model's init net. ``names`` are the blobs that there must
    be.
    """
    where, state = f"checkpoint {checkpoint.path}", checkpoint.state
    differences = [
        f"{key} is {state.config.get(key)!r} there, {config.get(key)!r} here"
        for key in dict.fromkeys([*config, *state.config])
        if state.config.get(key) != config.get(key)
    ]
    if differences:
        raise CheckpointError(f"{where} is of another run: {'; '.join(differences)}")
    if state.seed != seed:
        raise CheckpointError(f"{where} is of another run: seed is {state.seed} there, {seed} here")
    if state.network != network:
        raise CheckpointError(
            f"{where} is of another network {model.name!r}: its operators, shapes or arguments are not those "
            f"of this one (SHA-256 {state.network[:16]}... there, {network[:16]}... here)"
        )
    for what, wrong in (
        ("lacks", set(names) - set(checkpoint.blobs)),
        ("also has", set(checkpoint.blobs) - set(names)),
    ):
        if wrong:
            raise CheckpointError(
                f"{where} {what} blob {min(wrong)!r}, wanted the {len(set(names))} of the model"
            )
    for name, value in checkpoint.blobs.items():
        here = workspace.spec(name)
        if isinstance(here, TensorSpec):
            found = (
                TensorSpec(value.shape, value.dtype)
                if isinstance(value, np.ndarray)
                else type(value).__name__
            )
            if found != here:
                raise CheckpointError(f"{where}: blob {name!r} is {found} there, {here} here")


class CheckpointFolder:
    """The latest checkpoints of a run in a folder, which is made when the first one is saved.

    Args:
        path: the folder.
        keep: how many to keep; older ones are deleted after a newer one is safe on the disk.
    """

    def __init__(self, path: AnyPath, *, keep: int = 2) -> None:
        self.path = Path(path)
        self._keep = max(1, keep)

    def paths(self) -> list[Path]:
        """The checkpoints that there are, the newest first."""
        if not self.path.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.path.iterdir() if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def save(self, state: RunState, model: Model, workspace: Workspace) -> Path:
        """Writes the checkpoint of ``state.step``; returns its path. Errors are :func:`write_checkpoint`'s.

        Checkpoints of later steps are deleted: they are of a run that was given up for this one, or damaged.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self._path_of(state.step)
        write_checkpoint(path, state, model, workspace)
        paths = self.paths()
        place = paths.index(path)
        self._delete(paths[:place] + paths[place + self._keep :])
        token = state.layout.get("token", "")
        for part, step, other in self._parts():
            if step == state.step and other != token:
                part.unlink(missing_ok=True)
        return path

    def save_part(self, step: int, rank: int, layout: Mapping[str, Any], workspace: Workspace) -> None:
        """Writes what a rank has for itself, ahead of :meth:`save` of that step. Errors are
        :func:`gpunet.training.parts.write_part`'s.
        """
        write_part(self._path_of(step), rank, layout, workspace)

    def _path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}.checkpoint"

    def _parts(self) -> list[tuple[Path, int, str]]:
        """Files of single ranks, with step and token."""
        if not self.path.is_dir():
            return []
        return [(p, int(m[1]), m[2]) for p in self.path.iterdir() if (m := PART_NAME.fullmatch(p.name))]

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; ``None`` if there is none at all.

        Damaged ones are reported by a warning in the log.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        problems = []
        for path in self.paths():
            try:
                found = read_checkpoint(path)
                if found.state.layout and not found.state.layout["shards"]:
                    for rank in range(found.state.layout["ranks"]):
                        found.own(rank)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                log.warning("%s; going on from the older %s", problem, path.name)
            return found
        if problems:
            raise CheckpointError(f"no checkpoint in {self.path} can be used: {'; '.join(problems)}")
        return None

    def clear(self) -> None:
        """Deletes all checkpoints."""
        self._delete(self.paths())

    def _delete(self, paths: list[Path]) -> None:
        """Deletes checkpoints, the files of ranks of steps that have none any more, and left-over pieces."""
        left_over = (
            [
                p
                for p in self.path.iterdir()
                if _LEFT_OVER.fullmatch(p.name) or PART_LEFT_OVER.fullmatch(p.name)
            ]
            if self.path.is_dir()
            else []
        )
        for path in [*paths, *left_over]:
            path.unlink(missing_ok=True)
        steps = {int(m[1]) for p in self.paths() if (m := _NAME.fullmatch(p.name))}
        for path, step, _ in self._parts():
            if step not in steps:
                path.unlink(missing_ok=True)


def _get(metadata: Mapping[str, Any], key: str, kind: type[T]) -> T:
    value = metadata.get(key)
    if type(value) is not kind:
        raise CheckpointError(
            f"the entry {key!r} of the metadata is {value!r:.60}, wanted a JSON {kind.__name__}"
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str) -> dict[str, int]:
    table: dict[str, Any] = _get(metadata, key, dict)
    wrong = [name for name, number in table.items() if type(number) is not int]
    if wrong:
        raise CheckpointError(
            f"the entry {key!r} of the metadata has {wrong[0]!r}, which is not a whole number"
        )
    return table

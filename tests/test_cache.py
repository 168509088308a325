"""Files that can be made again: written whole or not at all, by any number of processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunet.cuda_kernels import cache


def test_keys_know_where_parts_end() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key("ab", "c") == cache.key("ab", "c")


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNET_CACHE_DIR", "/somewhere")
    assert cache.folder("cubin") == Path("/somewhere/cubin")
    monkeypatch.delenv("GPUNET_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache.folder("cubin") == Path("/home/user/.cache/gpunet/cubin")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache.write(tmp_path / "file" / "cubin" / "x", b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write(tmp_path / "x", b"before")
    opened = os.fdopen

    def full(handle: int, mode: str) -> Any:
        opened(handle, mode).close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    cache.write(tmp_path / "x", b"after")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"before"


WRITER = """
import sys
from pathlib import Path
from gpunet.cuda_kernels import cache
path, data = Path(sys.argv[1]), sys.argv[2].encode() * 50_000
for _ in range(100):
    cache.write(path, data)
    assert len(set(path.read_bytes())) == 1, "a file of two writers"
    assert path.stat().st_size == len(data)
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "x", word]) for word in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["x"]

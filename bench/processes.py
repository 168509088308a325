"""Other Python processes that import this gpunet, wherever it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpunet
from gpunet.errors import GpunetError


class ProcessError(GpunetError):
    """A process that was to be measured failed."""


def run(*arguments: str) -> str:
    """What `python ARGUMENTS` prints. Raises :class:`ProcessError` if it fails."""
    root = str(Path(gpunet.__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ProcessError(f"python {' '.join(arguments)} ended with status {done.returncode}: {last}")
    return done.stdout

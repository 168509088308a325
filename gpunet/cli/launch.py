"""``gpunet launch``: a thin layer over ``mpirun``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import click

from gpunet.cli import Command
from gpunet.cores import usable_cores
from gpunet.errors import ArgumentError, DeviceError

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: What asks a job to end; none of these may end the launcher alone.
_SIGNALS: Final = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
    if hasattr(signal, name)
)


#: The character "\b" keeps click from joining the lines behind it.
_HELP: Final = """Run COMMAND as several ranks of one job, by mpirun.

COMMAND may be `gpunet …`, a Python script, or anything else. What is started by srun or mpirun already is run
as it is. The mpirun is the one beside the running Python, else the first of PATH.

\b
gpunet launch -n 4 -- gpunet train resnet20
gpunet launch -n 8 --hosts node1,node2 -- train.py --epochs 3
"""


@click.command(
    cls=Command,
    help=_HELP,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=click.IntRange(1), help="Number of ranks; of a Slurm job its tasks.")
@click.option(
    "--hosts",
    default="",
    metavar="NAME,…",
    help="Hosts to run on, with equal numbers of ranks; by default those of the Slurm job, else this one.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="End the job this long after a rank has failed; 0 for never.  [default: 30]",
)
@click.option("--print", "show", is_flag=True, help="Print the command that would be run, and stop.")
@click.argument("words", metavar="COMMAND…", nargs=-1, required=True, type=click.UNPROCESSED)
def command(ranks: int | None, hosts: str, timeout: float | None, show: bool, words: tuple[str, ...]) -> None:
    """Run COMMAND as several ranks of one job, by mpirun."""
    from gpunet.discovery import discover

    env, translated = dict(os.environ), False
    if timeout is not None:
        env["GPUNET_COLLECTIVE_TIMEOUT"] = f"{timeout:g}"
    own = python_command(words)
    if discover().size > 1:
        line = own
    else:
        count = ranks or _slurm_tasks(env)
        names = [name for name in hosts.split(",") if name] or slurm_hosts(env.get("SLURM_JOB_NODELIST", ""))
        share = -(-count // max(1, len(names)))
        for name in _THREADS:
            # Ranks of one host share its cores.
            env.setdefault(name, str(max(1, len(usable_cores()) // share)))
        mpirun = find_mpirun(env)
        version = _version(mpirun)
        line = [mpirun, *mpirun_options(version, count, names), *own]
        translated = is_open_mpi(version)
    if show:
        click.echo(shlex.join(line))
        return
    sys.stdout.flush()
    try:
        if translated:
            sys.exit(run_with_time_to_save(line, env))
        os.execvpe(line[0], line, env)
    except OSError as error:
        raise DeviceError(f"cannot run {line[0]!r}: {error.strerror or error}") from error


def run_with_time_to_save(line: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs Open MPI's ``mpirun``, and returns its exit status.

    That kills the ranks half a second after it got SIGTERM or SIGINT, but passes SIGUSR1 on to them. So the
    first such signal reaches it as SIGUSR1, on which ranks that train save and end; a second one as it is.
    """
    process: subprocess.Popen[bytes] | None = None
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if process is not None:
            process.send_signal(signal.SIGUSR1 if len(came) == 1 else number)

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    # Apart from the terminal, whose Ctrl-C reaches all processes that belong to it.
    process = subprocess.Popen(line, env=env, start_new_session=True)
    if came:
        process.send_signal(signal.SIGUSR1)
    status = process.wait()
    if came and status:
        return 128 + came[0]
    return status if status >= 0 else 128 - status


def python_command(words: Sequence[str]) -> list[str]:
    """``gpunet`` and Python scripts are run by the running Python."""
    first, *rest = words
    if first == "gpunet":
        return [sys.executable, "-m", "gpunet", *rest]
    if first == "python":
        return [sys.executable, *rest]
    return [sys.executable, first, *rest] if first.endswith(".py") else [first, *rest]


def find_mpirun(env: Mapping[str, str]) -> str:
    """The ``mpirun`` beside the running Python, where the wheels of MPI put it, else that of ``PATH``."""
    beside = Path(sys.executable).parent / "mpirun"
    if beside.is_file():
        return str(beside)
    found = shutil.which("mpirun", path=env.get("PATH")) or shutil.which("mpiexec", path=env.get("PATH"))
    if found is None:
        raise DeviceError("there is no mpirun; pip install 'gpunet[mpi]' brings one, with the library for it")
    return found


def _version(mpirun: str) -> str:
    done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def is_open_mpi(version: str) -> bool:
    """Whether an ``mpirun`` that says this of its version is Open MPI's."""
    return re.search(r"open.?mpi|open-?rte|prte", version, re.IGNORECASE) is not None


def mpirun_options(version: str, ranks: int, hosts: Sequence[str]) -> list[str]:
    """The options of an ``mpirun`` that says this of its version."""
    share = -(-ranks // max(1, len(hosts)))
    options = ["-n", str(ranks)]
    if is_open_mpi(version):
        # More ranks than cores are no error here.
        options += ["--oversubscribe"]
        return [*options, "--host", ",".join(f"{name}:{share}" for name in hosts)] if hosts else options
    return [*options, "-hosts", ",".join(hosts), "-ppn", str(share)] if hosts else options


def _slurm_tasks(env: Mapping[str, str]) -> int:
    text = env.get("SLURM_NTASKS", "")
    if not text.isdecimal() or not int(text):
        raise ArgumentError("the number of ranks is missing, wanted -n N (or a Slurm job, which has tasks)")
    return int(text)


def slurm_hosts(nodes: str) -> list[str]:
    """The names in Slurm's short form: ``a[1-3,07],b`` is a1, a2, a3, a07 and b.

    Raises :class:`ArgumentError` for anything else.
    """
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)?|[\[\]]", nodes):
        match = re.fullmatch(r"([^\[\]]+)(?:\[([\d,-]+)\])?([^\[\]]*)", part)
        if match is None:
            raise ArgumentError(
                f"cannot read the list of hosts {nodes!r}, wanted names such as 'node[1-3],other'"
            )
        stem, numbers, tail = match.groups()
        for span in (numbers or "").split(","):
            low, _, high = span.partition("-")
            last = int(high or low or 0)
            names += (
                [f"{stem}{n:0{len(low)}d}{tail}" for n in range(int(low), last + 1)] if low else [stem + tail]
            )
    return names

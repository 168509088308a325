"""The command line. Each command is a module here, imported when it is used."""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
import traceback
from typing import Any, Final

import click

from gpunet._version import __version__

#: Modules of the commands, by name, and what ``gpunet --help`` says of them without importing them.
COMMANDS: Final = {
    "train": "Train a model on images.",
    "predict": "Classify images with a saved model.",
    "time": "Time a net and each of its operators.",
    "explain": "Print how a net is compiled: passes, schedule, memory.",
    "draw": "Draw a net as SVG or for Graphviz.",
    "check-races": "Prove that the schedule of a net has no races.",
    "info": "Describe a saved model: operators, parameters, FLOPs, memory.",
    "launch": "Run a command as several ranks, on this and other hosts.",
    "devices": "Tell which devices there are, and what is missing for others.",
    "ops": "Describe the operators that nets may have.",
    "check-grad": "Check an operator: its gradient, and its kernels on devices.",
}


class Commands(click.Group):
    """Finds commands by name, and turns errors that users can mend into one line and exit status 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported; ``None`` if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"gpunet.cli.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments begin with; where there is none, the error names the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(error.message + hint, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        from gpunet.errors import GpunetError

        debug = ctx.ensure_object(dict)
        logger = logging.getLogger("gpunet")
        handler = _Warnings(logging.WARNING)
        logger.addHandler(handler)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except KeyboardInterrupt as error:
            _end_other_ranks(error)
            click.secho("interrupted", fg="yellow", err=True)
            ctx.exit(130)
        except (GpunetError, OSError, MemoryError) as error:
            if debug.get("debug"):
                traceback.print_exc()
            # Being interrupted is no error, and has an exit status of its own.
            exit_code = getattr(error, "exit_code", None)
            if exit_code is None:
                _end_other_ranks(error)
                click.secho(f"error: {_message(error)}", fg="red", err=True)
            else:
                click.secho(_message(error), fg="yellow", err=True)
            ctx.exit(1 if exit_code is None else exit_code)
        finally:
            logger.removeHandler(handler)


def _end_other_ranks(error: BaseException) -> None:
    """Ends the job with a message, if this process is one rank of several; the others would wait for it."""
    failure = sys.modules.get("gpunet.distributed.failure")
    if failure is not None:
        failure.fail(error)


class _Warnings(logging.Handler):
    """Shows what gpunet logs as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        click.secho(f"{record.levelname.lower()}: {record.getMessage()}", fg="yellow", err=True)


class Command(click.Command):
    """A command that takes ``--debug`` like the group does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(_debug_option())


def _debug_option() -> click.Option:
    def remember(ctx: click.Context, option: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(dict)["debug"] = True

    return click.Option(
        ["--debug"], is_flag=True, expose_value=False, callback=remember, help="Show where an error happened."
    )


def _message(error: BaseException) -> str:
    """One line that says what went wrong."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    elif isinstance(error, MemoryError):
        text = f"not enough memory ({error})" if str(error) else "not enough memory"
    else:
        text = str(error)
    return " ".join(text.split())


@click.group(
    cls=Commands,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="gpunet")
def main() -> None:
    """Run and train neural networks that are written as Caffe2 writes them."""

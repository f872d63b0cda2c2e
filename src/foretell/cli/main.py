"""The `foretell` command: dispatch, exit codes, one-line errors.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretell import __version__
from foretell.cli.bench import bench
from foretell.cli.chat import chat
from foretell.cli.demo import demo
from foretell.cli.doctor import doctor
from foretell.cli.evaluate import evaluate
from foretell.cli.generate import generate
from foretell.cli.options import DebugOption, Invocation
from foretell.cli.plan import plan
from foretell.cli.train import train
from foretell.cli.tune import tune
from foretell.errors import ConfigError, ForetellError

app = typer.Typer(
    name="foretell",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (generate, chat, plan, demo, tune, bench, doctor):
    app.command()(command)
app.add_typer(train)
app.add_typer(evaluate)


def main() -> None:
    """Run the command line and exit with its code."""
    # Read when torch loads libgomp: its workers wait for the next operation of a pass in a loop (about 0.1 s at most)
    # instead of going to sleep. Median passes were 2 to 14 % shorter on two noisy cores, and as much for transformers.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000000")
    _open_closed_streams()
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors become one line on stderr."""
    invocation = Invocation()
    try:
        code = app(args=list(args), prog_name="foretell", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    except KeyboardInterrupt:
        return 130
    except typer.Abort as error:
        if isinstance(error.__cause__, EOFError):  # typer takes any end of a file for the user's wish to stop
            return _report(f"unexpected end of a file: {error.__cause__}", error.__cause__, 1, invocation)
        return 130
    except typer.TyperException as error:
        message = error.format_message()
        return _report(f"{message} (see foretell --help)", error, 2, invocation) if message else 2
    except ForetellError as error:
        return _report(str(error), error, 2 if isinstance(error, ConfigError) else 1, invocation)
    except UnicodeEncodeError as error:
        return _report(f"stdout takes {error.encoding} only: set PYTHONIOENCODING=utf-8", error, 1, invocation)
    except OSError as error:
        where = "" if error.filename is None else f" {error.filename}"
        return _report(f"cannot read or write{where}: {error.strerror or error}", error, 1, invocation)
    except Exception as error:
        hint = "" if invocation.is_debug else " (--debug prints the traceback)"
        return _report(f"unexpected {type(error).__name__}: {error}{hint}", error, 1, invocation)
    return code if isinstance(code, int) else 0


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=lambda value: _version(value))
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Several tokens per forward pass, without changing what the model says."""


def _open_closed_streams() -> None:
    """Put the null device where the caller closed a standard stream, so that nothing stumbles over None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # lives as long as the process


def _version(value: bool) -> None:
    if value:
        print(f"foretell {__version__}")
        raise typer.Exit


def _report(message: str, error: BaseException, code: int, invocation: Invocation) -> int:
    if invocation.is_debug:
        traceback.print_exception(error, file=sys.stderr)
    print(f"foretell: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _closed_pipe() -> int:
    # The reader has left. What Python would still flush at exit goes nowhere, without a word.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1

"""The command line. Bad input gets one line on standard error and a fixed exit code (see errors.py)."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from redgrape.cli import parser
from redgrape.errors import ConfigError, RedgrapeError, StorageError, enough_memory
from redgrape.reading.terminal import printable

WELCOME = """redgrape trains federated models on long-tailed data. To begin:

  redgrape compare fedavg redgrape --net mlp   train two methods, compare them
  redgrape data show --ir 100 --clients 20     show the examples of each client
  redgrape methods                             list the methods

`redgrape --help` lists all commands, `redgrape COMMAND --help` its options."""

GOING_ON = ("compare", "deploy run", "reproduce", "sweep")  # run again, these commands continue their work
ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143}  # exit codes of commands ended by a signal


def main(arguments: list[str] | None = None) -> NoReturn:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next opened file would take its descriptor
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may hold any character; a terminal may be ASCII
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code in ENDED.values():
        for number in ENDED:
            signal.signal(number, signal.SIG_DFL)  # the next signal ends the process silently
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    with ending_at_signals():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    if not words:
        print(WELCOME, file=sys.stderr)
        return ConfigError.exit_code  # nothing was asked: a script with an empty variable should notice
    try:
        try:
            options = parser.build().parse_args(words)
            with enough_memory(), no_exit():
                options.command(options)
        finally:
            sys.stdout.flush()  # here, so that errors are still reported
    except RedgrapeError as error:
        if debug:
            raise
        print(f"redgrape: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        what = "terminated" if isinstance(error, _Terminated) else "interrupted"
        again = [f"run `redgrape resume {run}`" for run in getattr(error, "__notes__", [])]
        if " ".join(words).startswith(GOING_ON):
            again = ["run the same command"]
        hint = f"; {printable(again[0])} to continue from the last finished round" if again else ""
        print(f"redgrape: {what}{hint}", file=sys.stderr)
        return ENDED[signal.SIGTERM if what == "terminated" else signal.SIGINT]
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if debug:
            raise
        print(f"redgrape: {_one_line(error)}", file=sys.stderr)
        return StorageError.exit_code
    return 0


@contextmanager
def no_exit() -> Iterator[None]:
    """No command exits by itself, so it was a user's own code. It must not end the command silently, or as if done."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"a method, or other own code, called sys.exit({error.code!r})") from error


class _Terminated(KeyboardInterrupt):
    """SIGTERM: handled like Ctrl-C, but with another exit code."""


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """End cleanly at the first Ctrl-C or SIGTERM and at once at the second. Workers end with the command."""

    def at_once(number: int, _: object) -> NoReturn:
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\x1b[?25h")  # a progress bar hides the cursor
        os._exit(128 + number)

    def in_order(number: int, _: object) -> NoReturn:
        for each in previous:
            signal.signal(each, at_once)
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    handlers = {number: signal.getsignal(number) for number in ENDED}
    previous = {n: handler for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, in_order)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))

"""How commands are declared, found and ended; and `diloco`, one program with the commands of all distributions.

A command is a function; cyclopts derives options, help and completion from its signature. A known error ends it with
one clear line and the error's exit code.

A distribution names its table of commands as an entry point of the group `diloco.commands`. A command's module is
imported only for that command, and imports neither torch nor grpc before its function runs, so help is fast.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from rich.console import Console

from diloco_common.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    DataError,
    DilocoError,
    did_you_mean,
    one_line,
    plain,
)

OPTIONS = Parameter(negative=(), allow_repeating=True)
"""For all options: there is no --no- form, and the last of several values wins, so scripts may append theirs."""


class QuietConsole(Console):
    """rich's Console, but a closed pipe raises BrokenPipeError as `print` does. rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def new_app(name: str, about: str, **more: Any) -> App:
    """A program, or a command with its own subcommands."""
    _open_what_is_closed()
    is_seen = sys.stdout.isatty()
    width = None if is_seen or "COLUMNS" in os.environ else 120  # in a file or a pipe
    app = App(
        name=name, help=about, version=version, help_format="plaintext", default_parameter=OPTIONS,
        help_formatter="default" if is_seen else "plain", console=QuietConsole(width=width),
        result_action="return_value", suppress_keyboard_interrupt=False,
        group_arguments=Group("Arguments", sort_key=10), group_parameters=Group("Options", sort_key=11),
        group_commands=Group("Commands", sort_key=20), **more,
    )  # fmt: skip
    app["--help"].help, app["--version"].help = "show this", "show the version"
    return app


def _open_what_is_closed() -> None:
    """Open standard streams that are closed: Python sets them to None. Some supervisors start processes like that."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends


def version() -> str:
    try:
        return f"diloco {metadata.version('decoupled-diloco')}"
    except metadata.PackageNotFoundError:
        return "diloco unknown (not installed)"


def run_app(app: App, argv: Sequence[str] | None = None) -> int:
    """Run a program with these arguments (None: those of the process), and return its exit code."""
    return run_command(lambda: _called(app, argv), name=app.name[0])


def _called(app: App, argv: Sequence[str] | None) -> int | None:
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(tokens, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        where = " ".join((app.name[0], *(error.command_chain or ())))
        raise ConfigError(f"{_words(error)} (see {where} --help)") from None
    return code if isinstance(code, int) else None


def _words(error: CycloptsError) -> str:
    option = error.argument.name if error.argument is not None else ""
    match error:
        case UnknownCommandError(app=App() as app, unused_tokens=[word, *_]):
            known = [name for name in app if not name.startswith("-")]
            return f"there is no {'option' if word.startswith('-') else 'command'} {word}{did_you_mean(word, known)}"
        case UnknownOptionError(token=token):
            word = token.keyword or token.value
            known = [name for argument in error.argument_collection for name in argument.names]
            return f"there is no option {word}{did_you_mean(word, known)}"
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            return f"{word}: this command takes no such argument"
        case MissingArgumentError(keyword=None):
            return f"{option if option.startswith('-') else option.upper()} is missing"
        case MissingArgumentError(keyword=keyword):
            return f"{keyword} takes a value, and none is given"
        case CoercionError(token=token) if token is not None and error.msg is None and _choices(error):
            choices = _choices(error)
            return f"{option} {token.value}: must be one of {', '.join(choices)}{did_you_mean(token.value, choices)}"
        case CoercionError(token=token) if token is not None:
            wanted = _WANTED.get(error.target_type)
            return f"{option} {token.value}: {error.msg or (f'must be {wanted}' if wanted else error)}"
    return " ".join(str(error).split())


_WANTED: dict[object, str] = {int: "a whole number", float: "a number", bool: "true or false"}


def _choices(error: CoercionError) -> list[str]:
    return [str(choice) for choice in getattr(error.target_type, "__args__", ())]


def end_on_sigterm() -> None:
    """Make SIGTERM end this process at once with exit code 0.

    A service calls this before its slow imports, when it has nothing to hand over, and replaces the handler afterwards.
    Raising an exception would not work: an import may catch it, and the process would go on.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_OK))


def leave(code: int) -> NoReturn:
    """End this process now: with torch loaded, the interpreter would take seconds to clean up."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_command(command: Callable[[], int | None], *, name: str) -> int:
    """Run the body of a command and return its exit code.

    A `DilocoError` becomes `name: message [CODE]` on stderr, one line per problem, without a traceback. Ctrl-C gives
    exit code 130. If the reader of our stdout closes it, the command ends quietly. Any other error is a bug and keeps
    its traceback.
    """
    try:
        code = command()
        sys.stdout.flush()
    except DilocoError as error:
        print(one_line(error, name), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_broken():
            raise
        return EXIT_OK
    return EXIT_OK if code is None else code


def _stdout_is_broken() -> bool:
    """Whether the reader of our stdout has gone, and not the peer of some socket."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    # Python flushes stdout again at exit, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


@contextlib.contextmanager
def disk_errors(kind: type[DilocoError] = DataError, what: str = "") -> Iterator[None]:
    """Turn an OSError into one line: the file, what could not be done with it, and why. Raises `kind`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{error.filename or 'the disk'}: {what}{error.strerror or error}") from None


NOT_WRITTEN = "cannot be written: "


def check_outputs(*paths: Path | None) -> None:
    """Create the folders of these output files; None is skipped.
    Raises ConfigError for a file that cannot be written, so that this is known before hours of work, not after."""
    for path in paths:
        if path is None:
            continue
        with disk_errors(ConfigError, NOT_WRITTEN):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


RUN = Group("Run", sort_key=1)
LOOK = Group("Look", sort_key=2)
MODEL = Group("Model", sort_key=3)
TRUST = Group("Who may call", sort_key=4)
STUDY = Group("Try out", sort_key=5)
SETTINGS = Group("Settings", sort_key=6)


class Command(NamedTuple):
    """One row of a table: the command's name, its module:function or module:app, its description, and its group."""

    name: str
    at: str
    about: str
    group: Group


ELSEWHERE: Mapping[str, Sequence[str]] = {
    "decoupled-diloco-ops": (
        "up", "init", "resume", "scale", "status", "record", "web", "logs", "health", "doctor", "explain", "checkpoint",
        "restore", "promote", "export", "pull", "certs", "token", "config", "completion",
    ),
    "decoupled-diloco-lab": ("plan", "simulate", "lab"),
}  # fmt: skip
"""Distribution -> its commands, for the message about a command that is not installed."""
IN_A_CLONE: Mapping[str, str] = {"decoupled-diloco-ops": "./deploy", "decoupled-diloco-lab": "./simulator"}
"""Distribution -> its folder in a clone, from which it can be installed without a package index."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `diloco` command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    asked = words[0] if words else ""
    if where := missing(installed()).get(asked):
        return run_command(partial(_refuse, where), name=f"diloco {asked}")
    return run_app(program(asked), words)


def installed() -> list[Command]:
    """The tables of all distributions, concatenated. If one cannot be imported, says so on stderr and skips it."""
    found: list[Command] = []
    for point in metadata.entry_points(group="diloco.commands"):
        try:
            found += point.load()
        except Exception as error:
            where = point.dist.name if point.dist else point.value
            print(f"diloco: the commands of {where} cannot be imported: {plain(str(error))}", file=sys.stderr)
    return found


def missing(commands: Sequence[Command]) -> dict[str, str]:
    """Our commands that are not among these -> the distribution that has them."""
    here = {command.name for command in commands}
    return {name: distribution for distribution, names in ELSEWHERE.items() for name in names if name not in here}


def _refuse(distribution: str) -> NoReturn:
    raise ConfigError(f"not installed; pip install {distribution} (in a clone: pip install {IN_A_CLONE[distribution]})")


def program(asked: str = "") -> App:
    """`diloco` with all installed commands, none imported yet. `asked`: the command whose full help is shown."""
    commands = installed()
    about = ["Train one model on many machines that fail, lag and sit behind thin links."]
    absent = missing(commands)
    for distribution in dict.fromkeys(absent.values()):
        names = ", ".join(name for name, where in absent.items() if where == distribution)
        about.append(f"Not installed (pip install {distribution}): {names}")
    app = new_app("diloco", "\n\n".join(about))
    for order, (name, at, line, group) in enumerate(commands):
        app.command(at, name=name, help=None if name == asked else line, group=group, sort_key=order)
    return app

"""How every command of this project ends: with one clear line for a known error, and with its exit code."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from diloco_common.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, DilocoError


class CommandParser(argparse.ArgumentParser):
    """An argument parser that refuses with one line (exit code 2) instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def end_on_sigterm() -> None:
    """From now on, SIGTERM ends this process at once with exit code 0.

    A service calls this before its slow imports, because it has nothing to hand over until they are done. It replaces
    the handler afterwards. Raising an exception would not work: some import catches it, and the process goes on.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_OK))


def run_command(command: Callable[[], int | None], *, name: str) -> int:
    """Run the body of a command and return its exit code.

    A `DilocoError` becomes `name: message [CODE]` on stderr, one line per problem, without a traceback. Ctrl-C gives
    exit code 130. If the reader of our stdout closes it, the command ends quietly. Anything else is a bug and keeps
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


def one_line(error: DilocoError, name: str) -> str:
    """The error as people see it: `name: message [CODE]`, with the code after the last line."""
    lines = str(error).splitlines() or ["failed"]
    return "\n".join(f"{name}: {line}" for line in lines) + f" [{error.code}]"


def _stdout_is_broken() -> bool:
    """True if the reader of our stdout has gone, and not the peer of some socket."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    if not any(events & select.POLLERR for _, events in poll.poll(0)):
        return False
    # Python flushes stdout once more at exit, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True

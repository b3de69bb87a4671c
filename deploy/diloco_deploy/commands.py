"""Small commands that need no cluster of their own: `diloco health`, `logs`, `config` and `completion`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from diloco_common import units
from diloco_common.command import new_app
from diloco_common.errors import ConfigError, DataError, did_you_mean
from diloco_common.options import (
    NO_SETTINGS,
    Config,
    Flag,
    Json,
    SettingsOptions,
    load_from,
    number,
    setting,
    settings_from,
)
from diloco_common.settings_loader import Given, Loaded
from diloco_deploy import LOOK_S
from diloco_deploy.health import TLS_VARIABLE, check


def health(
    *,
    grpc: Annotated[
        str | None, Parameter(metavar="HOST:PORT", help="address of a shard; healthy if grpc.health.v1 says SERVING")
    ] = None,
    http: Annotated[
        str | None, Parameter(metavar="HOST:PORT", help="address of a shard or worker; healthy if /readyz says so")
    ] = None,
    tls: Annotated[
        Path | None,
        Parameter(
            metavar="FOLDER", help="if it serves over TLS: a folder of `diloco certs issue`, such as its own",
            show_default=f"${TLS_VARIABLE}",
        ),
    ] = None,
) -> int:  # fmt: skip
    """Ask one process whether it is healthy. Exit code 0 if it is, 1 if not."""
    if (grpc is None) == (http is None):
        raise ConfigError("give either --grpc or --http: diloco health --grpc 127.0.0.1:50051")
    return check(grpc, http, tls)


_LINES = number(units.whole, 0, 1_000_000, "a whole number")


def logs(
    members: Annotated[
        list[str] | None, Parameter(metavar="MEMBER", help="such as worker-0; default: all", show_default=False)
    ] = None,
    /,
    *,
    folder: Annotated[
        str | None, setting("cluster.folder", "PATH", "folder of the cluster that `diloco up` runs, or ran")
    ] = None,
    config: Config = None,
    lines: Annotated[int, Parameter(converter=_LINES, metavar="N", help="the last lines of each member")] = 20,
    follow: Annotated[Flag, Parameter(name=("--follow", "-f"), help="follow new lines until Ctrl-C")] = False,
) -> int:
    """Show the logs of a cluster on this machine, the last lines of each member."""
    where = settings_from(SettingsOptions(config), {"cluster.folder": folder}).cluster.folder / "logs"
    found = {path.stem: path for path in sorted(where.glob("*.log"))}
    if not found:
        raise DataError(f"{where}: there are no logs; give the --folder of a cluster that `diloco up` runs, or ran")
    for name in members or ():
        if name not in found:
            raise ConfigError(f"{name} has no log in {where}: there are {', '.join(found)}{did_you_mean(name, found)}")
    shown = {name: found[name] for name in members or found}
    ends = {name: _show_end(name, path, lines, len(shown) > 1) for name, path in shown.items()}
    while follow:
        time.sleep(LOOK_S)
        if not members:  # include workers that were added since
            shown |= {path.stem: path for path in sorted(where.glob("*.log"))}
        for name, path in shown.items():
            ends[name] = _show_rest(name, path, ends.get(name, 0), len(shown) > 1)
    return 0


def _show_end(name: str, path: Path, lines: int, named: bool) -> int:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=lines):
            _print(name, line, named)
        return file.tell()


def _show_rest(name: str, path: Path, start: int, named: bool) -> int:
    try:
        size = path.stat().st_size
    except OSError:
        return 0  # the file was replaced
    if size == start:
        return start
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(start if size > start else 0)
        for line in file:
            _print(name, line, named)
        return file.tell()


def _print(name: str, line: str, named: bool) -> None:
    print(f"{name}: {line.rstrip()}" if named else line.rstrip(), flush=True)


config = new_app("config", "Show the settings of a run, and where each one comes from.")


@config.command(help="show every setting, as a file for --config")
def show(
    *,
    origin: Annotated[Flag, Parameter(help="say where each setting comes from: a line of a file, a variable")] = False,
    given: Annotated[Flag, Parameter(help="only settings that differ from the default")] = False,
    json: Json = False,
    options: SettingsOptions = NO_SETTINGS,
) -> int:
    """Show every setting with its value, as TOML for --config. With --origin, each shows its source: a line of the
    file, an environment variable, --set, or the default."""
    found = settings_with_origins(load_from(options, {}), only_given=given)
    if json:
        print(dumps({name: {"value": one.value, "origin": one.source} for name, one in found.items()}, indent=2))
    else:
        print("\n".join(as_lines(found, origin=origin)))
    return 0


def settings_with_origins(loaded: Loaded, *, only_given: bool = False) -> dict[str, Given]:
    """Every setting (section.key) with its effective value as JSON, and its source."""
    tree = loaded.settings.model_dump(mode="json")
    return {
        name: Given(value, loaded.given[name].source if name in loaded.given else "default")
        for section, keys in tree.items()
        for key, value in keys.items()
        if (name := f"{section}.{key}") in loaded.given or not only_given
    }


def as_lines(found: Mapping[str, Given], *, origin: bool) -> Iterator[str]:
    """Lines of TOML. None becomes a comment, because TOML has no null."""
    last = ""
    for name, one in found.items():
        section, key = name.split(".")
        if section != last:
            yield from (["", f"[{section}]"] if last else [f"[{section}]"])
            last = section
        # Numbers, strings, lists and booleans look the same in JSON, except very small numbers, which do not occur.
        line = f"# {key} =" if one.value is None else f"{key} = {dumps(one.value, ensure_ascii=False)}"
        yield f"{line:<40}  # {one.source}" if origin else line


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="the shell")],
    /,
    *,
    install: Annotated[
        bool, Parameter(help="install it where the shell finds it, and say where", show_default=False)
    ] = False,
) -> int:
    """Print the completion of `diloco` for a shell: `source <(diloco completion bash)` tries it in this one."""
    from diloco_common.command import program

    app = program()
    if install:
        print(f"{app.install_completion(shell=shell, add_to_startup=True)}: written; it works in the next {shell}")
    else:
        print(app.generate_completion(shell=shell))
    return 0

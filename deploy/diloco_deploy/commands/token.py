"""`diloco token`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import new_app
from diloco_common.errors import ConfigError, did_you_mean
from diloco_common.options import Days
from diloco_deploy.commands.certs import CERTS, Folder

app = new_app(
    "token",
    "`diloco token FILE` writes a random bearer token, which shards and workers share. `diloco token issue` signs one "
    "for one caller.",
)


@app.command(help="make the bearer token for shards and workers; `diloco token FILE` is short for it")
@app.default
def share(file: Annotated[Path, Parameter(metavar="FILE", help="written, unless it exists")], /) -> int:
    """Write a random bearer token to a file that only you can read. Keeps an existing file."""
    from diloco_deploy.token import make_bearer_token

    if not file.is_absolute() and file.parent == Path() and (meant := did_you_mean(file.name, ("issue",))):
        raise ConfigError(f"there is no command {file}{meant} For a file, take another name")
    print(f"{file}: {'made' if make_bearer_token(file) else 'exists already'}")
    return 0


@app.command(help="sign a token for one learner or observer")
def issue(
    identity: Annotated[str, Parameter(metavar="IDENTITY", help="learner/ID, shard/N, observer/NAME or admin/NAME")],
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FILE", help="the token, for security.token_file")],
    days: Annotated[Days, Parameter(help="days until it expires")] = 30.0,
    folder: Folder = CERTS,
) -> int:
    """Sign a token for one learner or observer. Shards check it with token.pub of the folder (security.token_key). For
    set-ups in which a proxy ends TLS.
    """
    from diloco_deploy.certs.commands import issue_token

    return issue_token(folder, identity, days, out)

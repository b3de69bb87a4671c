"""`diloco certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import new_app
from diloco_common.options import Days, Flag

Folder = Annotated[Path, Parameter(metavar="PATH", help="of the authority")]
Run = Annotated[str, Parameter(metavar="ID", help="run.id")]
Identities = Annotated[
    list[str], Parameter(metavar="IDENTITY", help="learner/ID, shard/N, observer/NAME or admin/NAME")
]
_VALID = Parameter(help="days until it expires")
CERTS = Path("certs")

app = new_app(
    "certs",
    "Make a certificate authority for a run, certificates for its shards, learners and observers, and the list of "
    "those that hold no longer.",
)


@app.command(help="make the authority of a run, once")
def init(*, run: Run = "local", folder: Folder = CERTS) -> int:
    """Make the authority of a run, once."""
    from diloco_deploy.certs.commands import init

    return init(folder, run)


@app.command(help="make certificates, or renew them")
def issue(
    identities: Identities,
    /,
    *,
    host: Annotated[
        list[str] | None, Parameter(metavar="NAME|IP", help="of a shard, as workers dial it; may be repeated")
    ] = None,
    days: Annotated[Days, _VALID] = 90.0,
    out: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="where it is put", show_default="SCOPE-NAME in the folder of the authority"),
    ] = None,
    keep: Annotated[
        Flag, Parameter(help="leave alone what is still good for a third of its time and these hosts")
    ] = False,
    folder: Folder = CERTS,
) -> int:
    """Make a key and a certificate per identity, in a folder of its own: copy that to its machine, and name it there
    with --tls FOLDER. The same again renews; the certificate before stays valid.
    """
    from diloco_deploy.certs.commands import issue

    return issue(folder, identities, host or (), days, out, keep=keep)


@app.command(name="list", help="show what was issued")
def listing(*, folder: Folder = CERTS) -> int:
    """Show what was issued."""
    from diloco_deploy.certs.commands import show_issued

    return show_issued(folder)


@app.command(help="put certificates and signed tokens on the deny-list")
def revoke(
    what: Annotated[
        str, Parameter(metavar="IDENTITY|SERIAL", help="such as learner/a, or a serial of `diloco certs list`")
    ],
    /,
    *,
    folder: Folder = CERTS,
) -> int:
    """Put everything that an identity was issued, or one serial, on the deny-list. Shards that read it
    (security.revoked) end the open calls of its holder within a second, and take no new ones.
    """
    from diloco_deploy.certs.commands import revoke

    return revoke(folder, what)


@app.command(help="stay, and see to the certificates of all containers on a host")
def tend(
    identities: Identities,
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="where they are put")],
    run: Run = "local",
    host: Annotated[
        list[str] | None,
        Parameter(metavar="NAME|IP", help="of every shard, beside the name of its folder; may be repeated"),
    ] = None,
    lend: Annotated[
        list[str] | None,
        Parameter(metavar="observer/NAME", help="our group may read its key: it runs as another user; may be repeated"),
    ] = None,
    days: Annotated[Days, _VALID] = 90.0,
    folder: Folder = CERTS,
) -> int:
    """Make the authority of a run if there is none. Then stay: issue and renew certificates for shards and observers,
    for each learner that makes a folder OUT/learners/learner-ID, and pass the deny-list on to the shards. SIGHUP renews
    all of them at once. docker-compose.yml runs this.
    """
    from diloco_deploy.certs.commands import tend

    return tend(folder, run, identities, host or (), days, out, lend or ())

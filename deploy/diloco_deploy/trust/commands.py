"""The commands `diloco certs` and `diloco token`."""

from __future__ import annotations

import os
import secrets
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco_common.command import new_app
from diloco_common.errors import ConfigError
from diloco_common.options import Days, Flag
from diloco_common.trust.files import shown
from diloco_common.trust.identity import Scope, subject_of
from diloco_deploy import EVERY_S
from diloco_deploy.trust import Issued
from diloco_deploy.trust.authority import CA_DAYS, CERTIFICATE_DAYS, is_good, make_authority, open_authority
from diloco_deploy.trust.tending import Tending

Folder = Annotated[Path, Parameter(metavar="PATH", help="folder of the authority")]
Run = Annotated[str, Parameter(metavar="ID", help="run.id")]
Identities = Annotated[
    list[str], Parameter(metavar="IDENTITY", help="learner/ID, shard/N, observer/NAME or admin/NAME")
]
_VALID = Parameter(help="days until it expires")
CERTS = Path("certs")

certs = new_app(
    "certs",
    "Make a certificate authority for a run, certificates for its shards, learners and observers, and the list of "
    "those that are revoked.",
)


@certs.command(help="make the authority of a run, once")
def init(*, run: Run = "local", folder: Folder = CERTS) -> int:
    """Make the authority of a run, once."""
    made = make_authority(folder, run, datetime.now(UTC))
    print(f"{folder}: the authority of run {run} {f'made, for {CA_DAYS} days' if made else 'exists already'}")
    return 0


@certs.command(help="make certificates, or renew them")
def issue(
    identities: Identities,
    /,
    *,
    host: Annotated[
        list[str] | None,
        Parameter(metavar="NAME|IP", help="name or address of a shard, as workers dial it; may be repeated"),
    ] = None,
    days: Annotated[Days, _VALID] = CERTIFICATE_DAYS,
    out: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="where to put it", show_default="SCOPE-NAME in the folder of the authority"),
    ] = None,
    keep: Annotated[
        Flag, Parameter(help="keep certificates that have a third of their time left and cover these hosts")
    ] = False,
    folder: Folder = CERTS,
) -> int:
    """Make a key and a certificate per identity, each in its own folder: copy that to its machine, and name it there
    with --tls FOLDER. Repeating the command renews; the earlier certificate stays valid."""
    authority, now = open_authority(folder), datetime.now(UTC)
    subjects = [subject_of(authority.run_id, text) for text in identities]
    if out is not None and len(subjects) > 1:
        raise ConfigError("--out takes one identity; name one, or leave --out out")
    for subject in subjects:
        into = out or authority.folder / str(subject).replace("/", "-")
        if keep and is_good(into, subject, host or (), authority.registry.revoked(), now):
            print(f"{into}: {subject} is kept: it is valid long enough")
            continue
        authority.check_free(into, subject)
        _, issued = authority.issue(subject, now, hosts=host or (), days=days, into=into)
        print(f"{into}: {subject}, serial {issued.serial}, until {_until(issued)}")
    return 0


@certs.command(name="list", help="show what was issued")
def listing(*, folder: Folder = CERTS) -> int:
    """Show what was issued."""
    authority, now = open_authority(folder), datetime.now(UTC)
    revoked = authority.registry.revoked()
    rows = [("IDENTITY", "STATE", "UNTIL", "SERIAL")]
    rows += [
        (str(one.subject), one.state(now, revoked), _until(one), one.serial) for one in authority.registry.issued()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    return 0


@certs.command(help="put certificates on the deny-list")
def revoke(
    what: Annotated[
        str, Parameter(metavar="IDENTITY|SERIAL", help="such as learner/a, or a serial of `diloco certs list`")
    ],
    /,
    *,
    folder: Folder = CERTS,
) -> int:
    """Put all certificates of an identity, or one serial, on the deny-list. Shards that read it (security.revoked) end
    the holder's open calls within a second, and take no new ones."""
    authority, now = open_authority(folder), datetime.now(UTC)
    registry = authority.registry
    if "/" in what:
        new, before = registry.revoke(subject_of(authority.run_id, what), now)
    else:
        new, before = registry.revoke_serial(what, now)
    for one in before:
        print(f"{one.serial} of {one.who} was revoked at {one.at}")
    for one in new:
        print(f"{one.serial} of {one.who} is revoked")
    if new:
        print(f"shards that read {registry.deny_list} act on it at once; copy it to those that have a copy")
    return 0


@certs.command(help="keep running, and maintain the certificates of all containers on a host")
def tend(
    identities: Identities,
    /,
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="where to put them")],
    run: Run = "local",
    host: Annotated[
        list[str] | None,
        Parameter(metavar="NAME|IP", help="name of every shard, besides that of its folder; may be repeated"),
    ] = None,
    lend: Annotated[
        list[str] | None,
        Parameter(metavar="observer/NAME", help="let our group read its key: it runs as another user; may be repeated"),
    ] = None,
    days: Annotated[Days, _VALID] = CERTIFICATE_DAYS,
    folder: Folder = CERTS,
) -> int:
    """Make the authority of a run if there is none, then keep running: issue and renew certificates for shards and
    observers, and for each learner that makes a folder OUT/learners/learner-ID, and pass the deny-list on to the
    shards. SIGHUP renews all of them at once. docker-compose.yml runs this."""
    from diloco_common.observe import logs

    make_authority(folder, run, datetime.now(UTC))
    authority = open_authority(folder)
    subjects, lent = ([subject_of(authority.run_id, text) for text in texts] for texts in (identities, lend or ()))
    if strange := [str(one) for one in lent if one.scope is not Scope.OBSERVER or one not in subjects]:
        raise ConfigError(f"--lend {strange[0]}: name an observer that is among the identities")
    logs.configure()
    log = logs.Log("certs")
    tending, said = Tending(authority, out, subjects, host or (), days, lent), ""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    while not {signal.SIGTERM, signal.SIGINT} & set(asked):
        renews = bool(asked)
        asked.clear()
        try:
            for words in tending.look(datetime.now(UTC), renews=renews):
                log.event("issued", to=words)
            why = tending.why_not
        except ConfigError as error:  # earlier certificates stay valid
            why = str(error)
        if why and why != said:
            log.error("some certificates could not be maintained", why=why)
        said = why
        time.sleep(EVERY_S / 4)  # shards read the deny-list as often, so a revoked caller is cut off within a second
    return 0


def _until(issued: Issued) -> str:
    return shown(datetime.fromtimestamp(issued.expires, UTC))


def token(file: Annotated[Path, Parameter(metavar="FILE", help="written, unless it exists")], /) -> int:
    """Write a random bearer token, which shards and workers share, to a file that only you can read. Keeps an existing
    file."""
    print(f"{file}: {'made' if make_bearer_token(file) else 'exists already'}")
    return 0


def make_bearer_token(path: Path) -> bool:
    """Write a random bearer token to `path` (mode 0600), unless the file exists. Returns whether it did.

    Processes that start together agree on one token: the first to create the file wins, and the file is complete when
    it appears. Raises ConfigError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file for the token")
        if path.exists():  # check first: the folder may be read-only
            return False
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
        finally:
            partial.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot make a bearer token here: {error.strerror}") from None
    return True

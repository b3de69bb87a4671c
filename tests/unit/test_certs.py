"""`diloco certs` and `diloco token`: what is in the folder, what is refused, and certificates that are tended."""

from __future__ import annotations

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from diloco_common.command import main
from diloco_common.errors import ConfigError, SecretExposed
from diloco_common.settings import SecuritySettings
from diloco_common.trust.files import read_bearer_token, read_folder, read_revocations
from diloco_common.trust.identity import Identity, Proof, Scope, Subject, subject_of
from diloco_deploy.trust.authority import make_authority, open_authority
from diloco_deploy.trust.tending import Tending


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an authority that the command line has made, where the command looks for it."""
    monkeypatch.chdir(tmp_path)
    assert main(["certs", "init", "--run", "r1"]) == 0
    return tmp_path / "certs"


def certificate_in(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


def test_a_certificate_names_its_holder_for_90_days(folder: Path) -> None:
    assert main(["certs", "issue", "learner/a"]) == 0

    files = read_folder(folder / "learner-a", needs_pair=True)
    found = certificate_in(folder / "learner-a")

    assert files.subject == Subject("r1", Scope.LEARNER, "a")
    assert files.subject.uri == "diloco://r1/learner/a"
    left = found.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=89) < left <= timedelta(days=90)
    found.verify_directly_issued_by(x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()))


def test_only_a_shard_may_serve_and_under_its_hosts(folder: Path) -> None:
    assert main(["certs", "issue", "shard/0", "--host", "ps-0", "--host", "10.0.0.7", "--host", "[fd00::1]"]) == 0
    assert main(["certs", "issue", "observer/x", "admin/y"]) == 0

    names = certificate_in(folder / "shard-0").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uses = {
        path.name: ExtendedKeyUsageOID.SERVER_AUTH
        in certificate_in(path).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        for path in (folder / "shard-0", folder / "observer-x", folder / "admin-y")
    }

    assert names.get_values_for_type(x509.DNSName) == ["ps-0", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "fd00::1", "127.0.0.1", "::1"]
    assert uses == {"shard-0": True, "observer-x": False, "admin-y": False}


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    main(["certs", "issue", "learner/a"])

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}

    assert {modes[name] for name in ("ca.key", "key.pem", "issued.jsonl")} == {0o600}
    assert {modes[name] for name in ("certs", "learner-a")} == {0o700}
    (folder / "learner-a" / "key.pem").chmod(0o644)
    with pytest.raises(SecretExposed):
        read_folder(folder / "learner-a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["issue", "a"], "names nobody: write learner/ID"),
        (["issue", "learner/../x"], "names nobody"),
        (["issue", "shard/one"], "shard/N with the shard's index"),
        (["issue", "learner/a", "--host", "ps-0"], "mirrors and standbys are dialed"),
        (["issue", "shard/0", "--host", "ps-0:50051"], "leave out the port"),
        (["issue", "learner/a", "--days", "0"], "must be days"),
        (["issue", "learner/a", "learner/b", "--out", "x"], "--out takes one identity"),
        (["revoke", "learner/nobody"], "was issued nothing here"),
        (["revoke", "nobody"], "neither an identity"),
        (["init", "--run", "r2"], "the authority of run 'r1', not of 'r2'"),
        (["list", "--folder", "absent"], "`diloco certs init` makes one"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder: Path, capsys, words: list[str], said: str) -> None:
    assert main(["certs", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_was_issued_is_listed_and_revoked_by_name_or_serial(folder: Path, capsys) -> None:
    main(["certs", "issue", "learner/a", "learner/b"])
    main(["certs", "issue", "learner/a"])
    records = (folder / "issued.jsonl").read_text()
    (folder / "issued.jsonl").write_text(records.replace("{", '{"kind": "certificate", ', 1))  # as once written
    registry = open_authority(folder).registry
    (b,) = [one.serial for one in registry.issued() if one.who == "diloco://r1/learner/b"]

    assert main(["certs", "revoke", "learner/a"]) == 0
    assert main(["certs", "revoke", ":".join(b[i : i + 2] for i in range(0, len(b), 2)).upper()]) == 0
    assert main(["certs", "revoke", "3a:a6:c6:8d:58:75:06:27"]) == 0, "that somebody else issued"
    capsys.readouterr()
    assert main(["certs", "list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["learner/a", "revoked"],
        ["learner/b", "revoked"],
        ["learner/a", "revoked"],
    ]
    revoked = read_revocations(folder / "revoked.json")
    assert {one.serial for one in revoked} == {one.serial for one in registry.issued()} | {"3aa6c68d58750627"}
    assert len(revoked) == 4


def test_keep_renews_what_is_old_revoked_or_for_other_hosts(folder: Path, capsys) -> None:
    def serial_after(*words: str) -> int:
        assert main(["certs", "issue", "--keep", "shard/0", *words]) == 0
        return certificate_in(folder / "shard-0").serial_number

    first = serial_after("--host", "ps-0")
    assert serial_after("--host", "ps-0") == first
    second = serial_after("--host", "ps-0", "--host", "ps-9")
    assert second != first
    main(["certs", "revoke", format(second, "x")])
    third = serial_after("--host", "ps-9")
    assert third != second
    open_authority(folder).issue(
        subject_of("r1", "shard/0"), datetime.now(UTC) - timedelta(days=70), hosts=["ps-9"], days=90
    )
    old = certificate_in(folder / "shard-0").serial_number
    assert serial_after("--host", "ps-9") != old


def test_what_is_proven_is_charged_under_its_own_name() -> None:
    def account(who: str, learner_id: str = "") -> str:
        proof = Proof(subject_of("r", who), "1", 0.0)
        return Identity("r", learner_id, peer="ipv4:10.0.0.1", proof=proof).account

    assert account("learner/a", "a") == "a"
    assert account("learner/a") == "a", "also where it only observes"
    assert account("observer/a") == "observer/a"
    assert Identity("r", "a", peer="ipv4:10.0.0.1").account == "ipv4:10.0.0.1", "it may make up any id"


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", [["ca.pem", "revoked.json", "issued.jsonl"], ["revoked.json"]])
def test_an_authority_whose_key_is_kept_elsewhere_is_not_made_again(folder, tmp_path, capsys, left) -> None:
    main(["certs", "issue", "learner/a"])
    main(["certs", "revoke", "learner/a"])
    for path in [path for path in folder.iterdir() if path.is_file()]:
        if path.name not in left:
            path.rename(tmp_path / f"away-{path.name}")
    before = everything_in(tmp_path)

    assert main(["certs", "init", "--run", "r1"]) == 2

    assert "but not its ca.key" in capsys.readouterr().err
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["certs", "issue", "learner/b", "--out", "certs/learner-a"], "certificate of learner/a, not of learner/b"),
        (["certs", "issue", "learner/b", "--out", "certs"], "the folder of an authority"),
        (["certs", "issue", "learner/b", "--out", "other-copied"], "ca.pem of another authority"),
        (["certs", "issue", "learner/b", "--out", "web"], "key.pem without a certificate"),
    ],
)
def test_what_is_of_others_is_not_overwritten(folder, tmp_path, capsys, words, said) -> None:
    main(["certs", "issue", "learner/a"])
    main(["certs", "init", "--folder", "other"])
    for name in ("other-copied", "web"):
        (tmp_path / name).mkdir()
    (tmp_path / "other-copied/ca.pem").write_bytes((tmp_path / "other/ca.pem").read_bytes())
    (tmp_path / "web/key.pem").write_text("a key")
    before = everything_in(tmp_path)
    capsys.readouterr()

    assert main(words) == 2

    assert said in capsys.readouterr().err
    assert everything_in(tmp_path) == before


def test_a_token_is_made_once_and_is_one_that_shards_take(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert main(["token", str(file)]) == 0
    made = read_bearer_token(SecuritySettings(token_file=file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["token", str(file)]) == 0
    assert read_bearer_token(SecuritySettings(token_file=file)) == made
    assert list(tmp_path.iterdir()) == [file]
    main(["token", str(tmp_path / "another")])
    assert (tmp_path / "another").read_text() != file.read_text()
    assert main(["token", str(tmp_path)]) == 2


NOW = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = ("shard/0", "shard/1", "observer/page", "observer/prometheus")
SUBJECTS = [subject_of("compose", who) for who in NAMES]


@pytest.fixture
def tending(tmp_path: Path) -> Tending:
    make_authority(tmp_path / "ca", "compose", NOW)
    return Tending(open_authority(tmp_path / "ca"), tmp_path, SUBJECTS, ["ps.example"], 90.0, lent=SUBJECTS[-1:])


@pytest.fixture
def tended(tending: Tending) -> Tending:
    """Shards and observers have theirs."""
    tending.look(NOW)
    return tending


def learner_wishes(out: Path, learner_id: str) -> Path:
    folder = out / "learners" / f"learner-{learner_id}"
    folder.mkdir()
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_shards_and_observers_get_theirs_at_once_and_then_there_is_nothing_to_do(tending, tmp_path):
    assert [words.partition(",")[0] for words in tending.look(NOW)] == list(NAMES)
    assert tending.look(NOW + timedelta(days=1)) == []
    for who, folder in [
        ("shard/0", "shards/shard-0"),
        ("observer/page", "observers/observer-page"),
        ("observer/prometheus", "observers/observer-prometheus"),
    ]:
        assert str(read_folder_of(tmp_path / folder).subject) == who


def read_folder_of(folder: Path):
    (folder / "key.pem").chmod(0o600)
    return read_folder(folder, needs_pair=True)


def test_a_shard_is_known_by_the_name_of_its_folder_and_under_the_given_hosts(tended, tmp_path):
    certificate = read_folder(tmp_path / "shards/shard-1").certificate
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"shard-1", "ps.example", "localhost"} == set(names.get_values_for_type(x509.DNSName))


def test_keys_are_for_their_owner_and_one_that_is_lent_for_our_group(tending, tmp_path):
    learner_wishes(tmp_path, "a")
    tending.look(NOW)
    assert mode(tmp_path / "shards/shard-0/key.pem") == 0o600
    assert mode(tmp_path / "learners/learner-a/key.pem") == 0o600
    assert mode(tmp_path / "observers/observer-page/key.pem") == 0o600
    assert mode(tmp_path / "observers/observer-page") == 0o700
    assert mode(tmp_path / "observers/observer-prometheus/key.pem") == 0o640
    assert mode(tmp_path / "observers/observer-prometheus") == 0o750


@pytest.mark.parametrize("name", ["learner-", "learner-a b", "learner-" + "x" * 65, "shard-0", "learner-a\nb"])
def test_a_folder_that_names_no_learner_gets_nothing(tended, tmp_path, name):
    (tmp_path / "learners" / name).mkdir()
    assert tended.look(NOW) == []


def test_everything_is_renewed_when_a_third_of_its_time_is_left(tending, tmp_path):
    learner_wishes(tmp_path, "a")
    tending.look(NOW)
    assert tending.look(NOW + timedelta(days=59)) == []
    assert len(tending.look(NOW + timedelta(days=61))) == len(SUBJECTS) + 1
    ends = read_folder(tmp_path / "learners/learner-a").certificate.not_valid_after_utc
    assert ends == NOW + timedelta(days=151)


def test_whoever_is_revoked_gets_no_other_until_somebody_issues_one(tending, tmp_path):
    folder = learner_wishes(tmp_path, "a")
    tending.look(NOW)
    authority = open_authority(tmp_path / "ca")
    (one,), _ = authority.registry.revoke(subject_of("compose", "learner/a"), NOW)

    assert tending.look(NOW) == []
    assert not (folder / "ca.pem").exists(), "whoever starts there waits"
    assert tending.look(NOW + timedelta(days=80), renews=True)[-1].startswith("observer/"), "the others go on"
    assert [r.serial for r in read_revocations(tmp_path / "shards/revoked.json")] == [one.serial]

    authority.issue(subject_of("compose", "learner/a"), NOW, into=folder)
    tending.look(NOW)
    assert read_folder(folder).pair
    assert tending.look(NOW + timedelta(days=61))[-1].startswith("learner/a"), "it is looked after again"


def test_a_link_of_a_learner_is_not_followed(tended, tmp_path):
    """It could lead to the authority, or to a shard."""
    before = {path: path.read_bytes() for path in (tmp_path / "ca").iterdir()}
    (tmp_path / "learners/learner-a").symlink_to(tmp_path / "ca")
    inside = learner_wishes(tmp_path, "b")
    (inside / "cert.pem").symlink_to(tmp_path / "ca/ca.pem")
    tended.look(NOW)
    assert (tmp_path / "ca/ca.pem").read_bytes() == before[tmp_path / "ca/ca.pem"]
    assert not (tmp_path / "ca/cert.pem").exists()
    assert not (inside / "cert.pem").is_symlink()


def test_in_a_crowd_of_folders_those_that_are_known_are_served_and_new_ones_are_refused(tending, tmp_path, monkeypatch):
    known = [learner_wishes(tmp_path, name) for name in ("y", "z")]
    tending.look(NOW)
    monkeypatch.setattr("diloco_deploy.trust.tending.LEARNERS_MAX", 3)
    for i in range(4):
        learner_wishes(tmp_path, str(i))

    assert len(tending.look(NOW + timedelta(days=61))) == len(SUBJECTS) + len(known) + 1, "one of them has room"
    assert "more than 3 folders: new learners get no certificate" in tending.why_not
    for path in (tmp_path / "learners").glob("learner-[0-9]"):
        shutil.rmtree(path)
    tending.look(NOW + timedelta(days=61))
    assert not tending.why_not


def test_damaged_records_keep_nobody_from_being_revoked(tended, tmp_path):
    with (tmp_path / "ca/issued.jsonl").open("a") as file:
        file.write("{")
    open_authority(tmp_path / "ca").registry.revoke_serial("3aa6c68d58750627", NOW)
    with pytest.raises(ConfigError, match="a line is damaged"):
        tended.look(NOW)
    assert [one.serial for one in read_revocations(tmp_path / "shards/revoked.json")] == ["3aa6c68d58750627"]

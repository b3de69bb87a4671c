"""The door of the settings: which source wins, and what is refused in which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_common.command import new_app, run_command
from diloco_common.errors import CannotConnect, ConfigError, DataError, InUse, NotJoined
from diloco_common.options import NO_SETTINGS, SettingsOptions, settings_from
from diloco_common.settings_loader import Given, load, load_saved, save


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def refusal(*sources: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*sources)
    return str(refused.value)


@pytest.mark.parametrize("tokens", range(5))
def test_later_sources_win(tmp_path: Path, tokens: int) -> None:
    loaded = load(
        write(tmp_path, "[run]\ntokens = 1\n") if tokens >= 1 else None,
        {"DILOCO_RUN__TOKENS": "2"} if tokens >= 2 else {},
        ["run.tokens=3"] if tokens >= 3 else [],
        {"run.tokens": Given("4", "--tokens")} if tokens >= 4 else {},
    )
    assert loaded.settings.run.tokens == tokens


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.tokens=2_000_000", "run", "tokens", 2_000_000),
        ("sync.quorum=all", "sync", "quorum", "all"),
        ("worker.shards=a:1, b:2", "worker", "shards", ("a:1", "b:2")),
        ("worker.folder=", "worker", "folder", None),
        ("worker.learner_id=7", "worker", "learner_id", "7"),
    ],
)
def test_text_becomes_the_type_of_the_setting(override: str, section: str, key: str, value: object) -> None:
    settings = load(None, {}, [override]).settings
    assert getattr(getattr(settings, section), key) == value


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[sync]\nquorm = 2\n", ":2: there is no setting sync.quorm; did you mean sync.quorum?"),
        ("[snc]\nquorum = 2\n", ":1: there is no section [snc]; did you mean sync?"),
        ("[run]\nquorum = 2\n", ":2: there is no setting run.quorum; did you mean sync.quorum?"),
        ("sync = 2\n", ":1: sync is a section; write [sync] and its keys below"),
        ("[sync]\nquorum == 2\n", ":2: TOML error: Invalid value"),
        ("[sync\n", ":1: TOML error: "),
        ("[run]\n\ntokens = -1\n", ":3): must be a whole number from 0 to 1000000000000000000 (tokens, such as 2M)"),
        ("[sync]\nfragments = 5000\n", "sync.fragments = 5000 ("),
        ("[lease]\nheartbeat_s = inf\n", "must be a number from 0.01 to 3600 (seconds)"),
        ("[sync]\ngrace = -1\n", "must be a number at least 0 or 'adaptive' (seconds)"),
        ("[sync]\nmerge = 'sum'\n", "must be one of 'auto', 'mean', 'rda', 'agreement'"),
        ("[lease]\nlease_s = 1.5\n", "lease: lease_s (1.5 s) must be at least two heartbeats (2 x 1 s)"),
        ("[lease]\nlease_s = 1.5\n", "given: lease.lease_s = 1.5 ("),
    ],
)
def test_a_wrong_file_is_refused_with_its_place_and_what_would_be_right(tmp_path: Path, toml: str, says: str) -> None:
    path = write(tmp_path, toml)
    said = refusal(path, {})
    assert says in said
    assert str(path) in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("DILOCO_SYNC__QUORM", "DILOCO_SYNC__QUORM is not a setting; did you mean DILOCO_SYNC__QUORUM?"),
        ("DILOCO_SYNC_QUORUM", "did you mean DILOCO_SYNC__QUORUM?"),
        ("DILOCO_SYNC__QUORUM", "sync.quorum = x (DILOCO_SYNC__QUORUM): must be a whole number"),
    ],
)
def test_a_wrong_environment_variable_is_refused_by_name(variable: str, says: str) -> None:
    assert says in refusal(None, {variable: "x"})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("sync.quorum", "--set sync.quorum: write section.key=value"),
        ("quorum=2", "there is no setting quorum; did you mean sync.quorum?"),
        ("zzz.zzz=2", "there is no setting zzz.zzz"),
        ("sync.quorum=0", "sync.quorum = 0 (--set): must be a whole number at least 1 or 'all'"),
    ],
)
def test_a_wrong_override_is_refused(override: str, says: str) -> None:
    assert says in refusal(None, {}, [override])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff"), "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    path = tmp_path / "run.toml"
    make(path)
    assert says in refusal(path, {})


def parsed(*argv: str) -> SettingsOptions:
    app = new_app("test", "")
    found: list[SettingsOptions] = []

    @app.default
    def take(*, options: SettingsOptions = NO_SETTINGS) -> None:
        found.append(options)

    app(argv, exit_on_error=False)
    return found[0]


def test_a_child_has_exactly_the_settings_of_its_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"DILOCO_RUN__SEED": "9"}
    options = parsed("--set", "worker.shards=a:1,b:2", "--set", "run.seed=1")
    parent = settings_from(options, {"data.source": "x"}, environ)
    save(parent, tmp_path / "settings.json")
    child = settings_from(parsed(f"--settings={tmp_path / 'settings.json'}"), {}, environ)
    assert child == parent
    assert (child.run.seed, child.data.source) == (1, "x")
    assert capsys.readouterr().err == "", "the environment decided nothing"


@pytest.mark.parametrize(("text", "says"), [("{", r":1: "), ("[]", "holds no settings"), ('{"a": {}}', "no section")])
def test_damaged_saved_settings_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_saved(tmp_path / "settings.json")


def test_a_command_may_have_defaults_of_its_own_which_lose_to_everything_that_is_given(tmp_path):
    ours = {"train.batch": Given(4, "ours"), "sync.quorum": Given(2, "ours"), "sync.sync_every": Given(8, "ours")}
    settings = load(write(tmp_path, "[sync]\nquorum = 3\n"), {"DILOCO_SYNC__SYNC_EVERY": "5"}, defaults=ours).settings
    assert (settings.train.batch, settings.sync.quorum, settings.sync.sync_every) == (4, 3, 5)


def failing(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "exit_code", "says"),
    [
        (ConfigError("first\nsecond"), 2, "diloco: first\ndiloco: second [BAD_CONFIG]\n"),
        (DataError("no"), 3, "diloco: no [BAD_DATA]\n"),
        (InUse("no"), 4, "diloco: no [IN_USE]\n"),
        (CannotConnect("no"), 5, "diloco: no [CANNOT_CONNECT]\n"),
        (NotJoined("no"), 6, "diloco: no [NOT_JOINED]\n"),
        (KeyboardInterrupt(), 130, "diloco: interrupted\n"),
    ],
)
def test_an_error_is_one_line_for_each_problem_and_an_exit_code(
    error: BaseException, exit_code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(failing(error), name="diloco") == exit_code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize(("returned", "exit_code"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_may_choose_its_exit_code(returned: int | None, exit_code: int) -> None:
    assert run_command(lambda: returned, name="diloco") == exit_code


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokenPipeError("of a socket, not of stdout")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_command(failing(error), name="diloco")

"""A flag beside a file of sites applies, or is refused."""

from pathlib import Path

import pytest

from diloco_deploy.cli import main

ONE = '[[site]]\nname = "a"\nchips = 64\nstep_time = "2s"\n'
TWO = ONE + '[[site]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("file", "words", "said"),
    [
        (ONE, "--learners 2", "--learners would change nothing: {file} has learners for every site; leave out --learn"),
        (ONE, "--chips 9", "--chips would change nothing: {file} has chips for every site"),
        (ONE, "--step-time 1s", "--step-time would change nothing: {file} has step_time for every site"),
        (TWO, "--chips 64", "--chips 64: 0 are left for 1 learners, and each needs one; ask for more chips"),
        ("", "--quorum 0", "sync.quorum = 0 (--quorum): must be a whole number at least 1 or 'all'"),
        ("", "--quorum most", "sync.quorum = most (--quorum): must be a whole number at least 1 or 'all'"),
        ("", "--quorum 9", "--quorum 9: there are 8 learners; ask for so many at most, or for all"),
        ("", "--grace -1", "sync.grace = -1 (--grace): must be a number at least 0 or 'adaptive' (seconds)"),
        ("", "--grace nan", "sync.grace = nan (--grace): must be a number at least 0 or 'adaptive' (seconds)"),
    ],
)
def test_simulate_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, words: str, said: str) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(file)
    assert main(["simulate", "--links", str(path), *words.split()]) == 2
    assert capsys.readouterr().err.startswith("diloco: " + said.format(file=path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "1,200,000 chips in 2 learners, 137 interruptions per hour"),
        ("--chips 1064", "1,064 chips in 2 learners, 0.121 interruptions per hour"),
        ("--mtbi 1h", "1,200,000 chips in 2 learners, 1.2e+06 interruptions per hour"),
        ("--failures fleet", "1,200,000 chips in 2 learners, 24.9 interruptions per hour"),
    ],
)
def test_simulate_applies(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(TWO)
    assert main(["simulate", "--links", str(path), "--hours", "0.01", *words.split()]) == 0
    assert capsys.readouterr().out.startswith(said)

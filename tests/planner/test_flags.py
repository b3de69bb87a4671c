"""A flag beside a file of sites applies, or is refused."""

from pathlib import Path

import pytest

from diloco_common.program import main

ONE = '[[site]]\nname = "a"\nchips = 64\nstep_time = "2s"\n'
PRICED = ONE + "[shards]\nprice_hour = 1\n[prices]\ndate = 2026-05-01\n"
TWO = ONE + '[[site]]\nname = "b"\n'


@pytest.mark.parametrize(
    ("file", "words", "said"),
    [
        (ONE, "--learners 2", "--learners would change nothing: {file} has learners for every site; leave out --learn"),
        (
            ONE + 'mtbi = "1d"\n',
            "--mtbi 1h",
            "--mtbi would change nothing: {file} has mtbi for every site",
        ),
        (TWO, "--chips 64", "--chips 64: 0 are left for 1 learners, and each needs one; ask for more chips"),
        (TWO + 'begins = "2d"\n', "", "b-0 begins after 48 hours, and 24 are simulated; ask for more --hours"),
        (PRICED, "", "{file}: shards have a price, and nobody says how many there are; write count = 2 in [shards]"),
        ("", "--quorum 0", "sync.quorum = 0 (--quorum): must be a whole number at least 1 or 'all'"),
        ("", "--quorum 9", "--quorum 9: there are 8 learners; ask for so many at most, or for all"),
        ("", "--grace -1", "sync.grace = -1 (--grace): must be a number at least 0 or 'adaptive' (seconds)"),
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


LINKED = ONE + 'up = "1Gbit"\nround_trip = "9ms"\ntokens_per_step = "2M"\n'
BOTH = LINKED + LINKED.replace('"a"', '"b"')
SHARDS = '[shards]\ncount = 3\ndisk = "1GB"\n'


@pytest.mark.parametrize(
    ("file", "words", "said"),
    [
        (LINKED, "--learners 2", "--learners would change nothing: {file} has learners for every site"),
        (LINKED, "--up 1Gbit", "--up would change nothing: {file} has up for every site"),
        (LINKED, "--round-trip 0s", "--round-trip would change nothing: {file} has round_trip for every site"),
        (SHARDS, "--shards 2", "--shards would change nothing: {file} has count for the shards; leave out --shards"),
        (None, "--tokens 1T", "--tokens would change nothing: without --sites FILE.toml no ways to train are weighed"),
        (ONE, "--days 0", "--days 0: must be days, above 0"),
        (ONE, "--days nan", "--days nan: must be days, above 0"),
    ],
)
def test_plan_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str | None, words: str, said: str
) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(file or "")
    assert main(["plan", "--params", "1B", *words.split(), *([] if file is None else ["--sites", str(path)])]) == 2
    assert said.format(file=path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "words", "link", "shards"),
    [
        (TWO, "--chips 128", "100 Mbit/s up, 100 Mbit/s down, 80 ms there and back", 1),
        (TWO, "--chips 65 --up 1Gbit --down 2Gbit --round-trip 0s", "1.00 Gbit/s up, 2.00 Gbit/s down, 0 ms", 1),
        (
            LINKED + '[[site]]\nname = "b"\n',
            "--chips 65 --up 5Gbit --round-trip 7ms",
            "1.00 Gbit/s up, 1.00 Gbit/s down, 9 ms",
            1,
        ),
        (BOTH + SHARDS, "", "1.00 Gbit/s up, 1.00 Gbit/s down, 9 ms", 3),
        (BOTH + '[shards]\ndisk = "25MB"\n', "", "1.00 Gbit/s up", 3),
        (BOTH, "--disk 25MB", "1.00 Gbit/s up", 3),
        (BOTH + '[shards]\nmerge = "2MB"\n', "", "1.00 Gbit/s up", 13),
    ],
)
def test_plan_applies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, words: str, link: str, shards: int
) -> None:
    path = tmp_path / "sites.toml"
    path.write_text(file)
    main(["plan", "--params", "100M", "--sites", str(path), *words.split()])
    said = capsys.readouterr().out
    assert link in said
    assert f"S = {shards}: " in said

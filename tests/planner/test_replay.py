"""Kept histories of real runs (`diloco up`, 2 shards, 3 workers, 20 s): shard 0 still decides as it did.

A change that is meant to decide otherwise records them anew: `diloco up --set run.history=F --set lease.lease_s=3`,
kill a process after some seconds, end the run, and keep F/decisions/shard-0.jsonl. `shard` pulls int8; `strangers` has
guard.trust=strangers, sync.push=int4 and sync.quorum=2.
"""

import json
import lzma
from pathlib import Path

import pytest

from diloco_deploy.cli import main
from diloco_planner.observed import observe
from diloco_planner.replay import read, replay

KEPT = Path(__file__).with_name("histories")


@pytest.fixture
def kept(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder as `run.history` names one."""
    folder = tmp_path / "decisions"
    folder.mkdir()
    (folder / "shard-0.jsonl").write_bytes(lzma.decompress((KEPT / f"{request.param}.jsonl.xz").read_bytes()))
    return tmp_path


@pytest.mark.parametrize(
    ("kept", "rounds"), [("worker", [97]), ("shard", [16, 12]), ("strangers", [69])], indirect=["kept"]
)
def test_a_kept_run_is_decided_as_it_was(kept: Path, rounds: list[int]) -> None:
    assert [(one.differs, one.rounds) for one in replay(kept)] == [("", count) for count in rounds]


@pytest.mark.parametrize("kept", ["worker"], indirect=True)
def test_what_would_have_come_of_it(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker died for 6 s. The simulation of the same run is near the record. Half of H makes twice the rounds."""
    run = observe(read(kept))
    assert len(run.learners) == 3
    assert sum(len(one.line.away) for one in run.learners if one.line is not None) == 1 + 3, "it, and all at the end"
    assert main(["replay", str(kept), "--h", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"].startswith("the record has 1 of 2 shards: its rounds are of those")
    then, now, other = found["results"].values()
    assert now["tokens_trained"] == pytest.approx(then["tokens_trained"], rel=0.01)
    assert now["rounds"] == pytest.approx(2 * then["rounds"], rel=0.1), "shard 0 alone is kept, of two"
    assert now["evictions"] == then["evictions"] == 1
    assert 1.6 < other["rounds"] / now["rounds"] < 2.1


@pytest.mark.parametrize("kept", ["worker", "shard", "strangers"], indirect=True)
def test_the_same_run_simulated_comes_near_the_record(kept: Path) -> None:
    run = observe(read(kept))
    found = run.simulate(run.settings, run.shards)
    assert found.tokens_trained == pytest.approx(run.result.tokens_trained, rel=0.01)
    assert found.tokens_merged == pytest.approx(run.result.tokens_merged, rel=0.06)


@pytest.mark.parametrize("kept", ["worker"], indirect=True)
def test_a_difference_and_a_wrong_question_are_told(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = kept / "decisions/shard-0.jsonl"
    assert main(["replay", str(file)]) == 0
    file.write_text(file.read_text().replace('"sync_every":24', '"sync_every":20', 1))
    assert main(["replay", str(kept)]) == 1
    said = capsys.readouterr().out
    assert "when it was recorded" in said
    assert "line " in said
    assert main(["replay", str(kept), "--quorum", "4"]) == 2
    assert "--quorum 4: there are 3 learners; ask for so many, or all" in capsys.readouterr().err
    assert main(["replay", str(kept), "--shards", "25"]) == 2
    assert "--shards 25: there are 24 fragments; ask for so many at most" in capsys.readouterr().err
    assert main(["replay", str(kept), "--quorum", "many"]) == 2
    assert "sync.quorum = many (--quorum): must be a whole number at least 1 or 'all'" in capsys.readouterr().err

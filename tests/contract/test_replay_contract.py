"""What a shard decided over real gRPC is decided again, to the last digit, by its core alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import settings_with

from diloco_common.errors import DataError
from diloco_planner.replay import replay


def recorded(serve, train, folder: Path) -> Path:
    """Two lives of a shard, of three learners each. One of them leaves early."""
    live(serve, train, folder, until=4)
    live(serve, train, folder, until=8)
    return folder


def live(serve, train, folder: Path, until: int) -> None:
    settings = settings_with(
        run={"history": folder},
        sync={"fragments": 3, "sync_every": 2, "quorum": 1, "grace": 0.0},
        shard={"data_dir": folder / "data"},
    )
    shard = serve(settings)
    a, b, c = (train(shard.address, name) for name in "abc")
    a.until(lambda: shard.version() >= until - 3, "a version")
    c.learner.close()
    for each in (a, b):
        each.until(lambda: shard.version() >= until, "versions")
    for each in (a, b):
        each.learner.close()
    shard.stop()


def test_every_decision_comes_out_as_it_was_recorded(serve, train, tmp_path, monkeypatch):
    folder = recorded(serve, train, tmp_path / "history")
    found = replay(folder)
    assert [(one.name, one.differs) for one in found] == [("shard-0", "")] * 2
    assert found[0].epoch < found[1].epoch
    assert all(one.rounds >= 6 and one.learners == 3 and one.calls > 50 and one.seconds > 0 for one in found)

    monkeypatch.setattr("diloco_server.core.due.needed", lambda quorum, members: members)
    differs = replay(folder)[0].differs
    assert "effects" in differs, differs


def test_what_nobody_recorded_is_said(tmp_path):
    with pytest.raises(DataError, match=r"run\.history = FOLDER"):
        replay(tmp_path)
    (tmp_path / "shard-0.jsonl").write_text(
        json.dumps({"t": 0, "what": "began", "settings": {"sync": {"fragments": -1}}, "epoch": 1}) + "\n"
    )
    with pytest.raises(DataError, match="cannot be read"):
        replay(tmp_path)

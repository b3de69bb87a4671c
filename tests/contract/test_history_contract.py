"""Histories that a real shard and real learners record keep every promise, and say what happened."""

from __future__ import annotations

from pathlib import Path

from in_process import settings_with

from diloco_common.observe.history import read_histories
from diloco_simulator.verify.judge import violations


def test_recorded_histories_tell_what_happened_and_keep_the_promises(serve, train, tmp_path: Path) -> None:
    folder = tmp_path / "history"
    shard = serve(settings_with(run={"history": folder}, sync={"sync_every": 2, "fragments": 2, "quorum": "all"}))
    a = train(shard.address, "a", history=folder)
    b = train(shard.address, "b", history=folder)

    def both_step() -> bool:
        b.step()
        return min(shard.version(0), shard.version(1)) >= 3

    a.until(both_step, "three versions")
    b.learner.close()
    a.learner.close()
    shard.stop()

    found = read_histories(folder)
    assert violations(found) == []
    assert (sorted(found.shards), sorted(found.learners)) == (["shard-0"], ["a", "b"])
    assert found.num_fragments == 2
    merges = found.merges()
    assert {(m.fragment, m.version) for m in merges} >= {(fragment, v) for fragment in (0, 1) for v in (1, 2, 3)}
    assert {m.learner for m in merges} == {"a", "b"}
    (process,) = found.learners["a"]
    steps = [line["step"] for line in process.of("stepped")]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["what"] for line in process.lines][-1] == "ended"
    gone = [line["code"] for line in found.shards["shard-0"][0].of("gone")]
    assert gone == ["LEFT", "LEFT"]

"""A learner hears why its control stream is refused, every time."""

from __future__ import annotations

from waiting import until

ENOUGH = 60
"""A refusal that met a report on its way was lost one time in five."""


def test_a_refused_stream_leads_to_a_new_lease_every_time(serve, front, train, monkeypatch):
    """Else the learner takes the shard for silent, and asks under the old lease again after a longer wait."""
    monkeypatch.setattr("diloco_worker.core.dialing.LONGEST_S", 0.001)
    shard = serve()
    between = front(shard)
    train(between.address, "a")
    between.refuse_attend = True
    between.loop.look(lambda: (between.joins.clear(), between.attends.clear()))
    shard.break_streams()

    until(lambda: len(between.attends) >= ENOUGH, "refused streams")

    joins, attends = between.loop.look(lambda: (between.joins[: ENOUGH - 1], between.attends[:ENOUGH]))
    assert len(joins) == ENOUGH - 1
    assert sorted(joins + attends)[::2] == attends, "a Join after each refusal, and nothing else"

"""Leaving with warning: real learners and real shards, of which one learner leaves in the middle of H steps."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from in_process import InProcessShard, settings_with
from torch import nn
from training import Training

import diloco_worker
from diloco_common.errors import WrongCall
from diloco_common.trust.identity import Identity
from diloco_server.shell import server
from diloco_server.shell.servicer import ParameterServicer
from diloco_worker.shell import ending
from waiting import DEADLINE_S

H = 500
EXACT = {"push": "float32", "pull": "float32", "sync_every": H, "fragments": 2}


def shards_of(serve, **sync):
    sections = {"sync": EXACT | sync}
    return [serve(settings_with(**sections, shard={"index": i, "count": 2})) for i in range(2)]


def merged(shard: InProcessShard, learner_id: str) -> int:
    return shard.loop.look(lambda: shard.core.membership.get(learner_id).tokens_merged)


@contextmanager
def training_on(*others: Training) -> Iterator[None]:
    """In the background, as the others of a run do."""
    is_over = threading.Event()

    def train() -> None:
        while not is_over.wait(0.001):
            for training in others:
                training.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("quorum", [1, 2, "all", 5])
def test_what_was_trained_is_merged_before_the_learner_is_gone(serve, train, quorum):
    """H = 500: less than one round. Without a last one, nothing of it would be in any version."""
    shards = shards_of(serve, quorum=quorum)
    addresses = ",".join(shard.address for shard in shards)
    a, b = train(addresses, "a"), train(addresses, "b", seed=1)
    for _ in range(120):
        a.step()
        b.step()
    with training_on(a):
        assert b.learner.leave()
    assert [merged(shard, "b") for shard in shards] == [120 * 8] * 2
    assert [shard.member_state("b") for shard in shards] == ["left"] * 2
    assert [shard.version(i) for i, shard in enumerate(shards)] == [1, 1], "one round, for all"
    assert b.learner.leave(), "repeating it changes nothing"
    with pytest.raises(WrongCall):
        b.step()


def test_who_has_nothing_to_hand_over_opens_no_round(serve, train):
    shards = shards_of(serve)
    a = train(",".join(shard.address for shard in shards), "a")
    assert a.learner.leave()
    assert [shard.version(i) for i, shard in enumerate(shards)] == [0, 0]


def test_leave_says_what_is_in_no_version(serve, train, written):
    gone, there = shards_of(serve)
    a = train(f"{gone.address},{there.address}", "a")
    a.step()
    gone.stop()
    assert not a.learner.leave(wait_s=0.5)
    assert merged(there, "a") == 8
    assert "some of this learner's work is in no version" in written.getvalue()
    assert f"work on 1 fragments of {gone.address}" in written.getvalue()


def test_a_run_that_has_its_budget_wants_no_more(serve, train):
    shard = serve(settings_with(run={"tokens": 64}, sync=EXACT | {"sync_every": 4, "quorum": 1}))
    a = train(shard.address, "a")
    a.until(lambda: a.learner.done, "the budget is reached")
    for _ in range(3):
        a.step()
    assert a.learner.leave()


def test_sigterm_hands_over_at_the_next_step_and_ends_the_process(serve, train, capsys):
    shards = shards_of(serve)
    addresses = ",".join(shard.address for shard in shards)
    b, a = train(addresses, "b"), train(addresses, "a", seed=1)
    for _ in range(120):
        a.step()
        b.step()
    os.kill(os.getpid(), signal.SIGTERM)
    with training_on(a), pytest.raises(SystemExit) as ended, b.learner:
        b.step()
    assert ended.value.code == 143
    assert [merged(shard, "b") for shard in shards] == [121 * 8] * 2
    assert capsys.readouterr().err.endswith(
        "diloco: SIGTERM; b has left the run after 121 steps; all of it is merged\n"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_loop_that_sigterm_has_broken_before_its_next_step_hands_over_too(serve, train, capsys):
    """To a whole process group: the workers of a DataLoader are gone, and it raises."""
    shards = shards_of(serve)
    a = train(",".join(shard.address for shard in shards), "a")
    for _ in range(7):
        a.step()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, a.learner:
        raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")
    assert ended.value.code == 143
    assert isinstance(ended.value.__context__, RuntimeError)
    assert [merged(shard, "a") for shard in shards] == [7 * 8] * 2
    assert capsys.readouterr().err.endswith("a has left the run after 7 steps; all of it is merged\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_step_that_is_too_long_to_wait_for_is_broken_off(serve, train, capsys, monkeypatch):
    monkeypatch.setattr(ending, "LEAVE_LEAST_S", 0.1)
    shard = serve(settings_with(sync=EXACT))
    a = train(shard.address, "a")
    for _ in range(7):
        a.step()

    def long_step() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(DEADLINE_S)
        pytest.fail("the step went on")

    with pytest.raises(SystemExit) as ended, a.learner:
        long_step()
    assert ended.value.code == 143
    assert merged(shard, "a") == 7 * 8 * 2
    said = capsys.readouterr().err
    assert "diloco: SIGTERM; the step took too long and was interrupted\n" in said
    assert said.endswith("a has left the run after 7 steps; all of it is merged\n")


class LateGoodbye(ParameterServicer):
    """Ends the control stream of a learner that leaves, and answers it a while later."""

    async def Leave(self, caller: Identity, requests: Any, context: Any) -> Any:
        answer = await super().Leave(caller, requests, context)
        for stream in list(self._service._host.streams):
            stream.end()
        await asyncio.sleep(0.3)
        return answer


def test_a_learner_waits_for_the_answer_to_its_goodbye(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ParameterServicer", LateGoodbye)
    shard = serve()
    learner = diloco_worker.join(shard.address, nn.Linear(4, 2), learner_id="a", wait_s=20)

    learner.close()

    assert shard.member_state("a") == "left"


LATE = "signal.raise_signal(signal.SIGTERM); notice.end(is_heeded=False)"
AGAIN = "handler = signal.getsignal(signal.SIGTERM); notice.end(is_heeded=True); signal.signal(signal.SIGTERM, handler)"


@pytest.mark.parametrize("what", [LATE, AGAIN + "; signal.raise_signal(signal.SIGTERM)"], ids=["late", "put back"])
def test_a_signal_for_no_learner_ends_the_process(what: str) -> None:
    """One that came while the learner closed, or to a handler that was put back later, as Lightning does."""
    begin = "import signal; from diloco_worker.shell.process import Notice; notice = Notice(lambda: None)"
    code = f"{begin}; {what}; print('on')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended.stderr

"""`take_number`: a learner's number before it has a model. Use it if the size of the model (words, users, classes)
depends on the data, and the number decides which part of the data this learner reads.

    index = diloco_worker.take_number(shards)
    data = load(part=index)
    learner = diloco_worker.join(shards, Model(data.num_words))      # learner.index == index
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diloco_common.errors import Busy, CannotConnect, ConfigError, Draining, HandshakeFailed
from diloco_common.observe import logs
from diloco_common.observe.logs import Log
from diloco_common.ports import Unavailable
from diloco_common.trust.credentials import Credentials, addresses_of
from diloco_common.trust.identity import Identity
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.messages import PROTOCOL, JoinAnswer, JoinRequest
from diloco_worker.shell import process
from diloco_worker.shell.arguments import check_seconds, check_who
from diloco_worker.shell.ending import Patience

ATTEMPT_S = 1.0
"""Seconds to wait for the answers of all shards before trying again."""

_taken: dict[tuple[str, str], int] = {}


def take_number(
    shards: str | Sequence[str], *, run: str = "local", learner_id: str = "", tls: str | Path | None = None,
    token: str | Path | None = None, wait_s: float | None = None,
) -> int:  # fmt: skip
    """The `index` that this learner will have: from 0, no other learner has it. Waits for shard 0, which assigns it.

    Arguments are those of `join`. The number is reserved for ten minutes for a `join` of this process under this
    learner id, and longer if nobody else takes it. A second call returns the same number, as do calls of other ranks
    with the same `learner_id`.

    Raises:
        ConfigError: an address is invalid, or shard 0 is not among the shards.
        CannotConnect: shard 0 did not answer within `wait_s` seconds; None waits forever, and logs it.
        HandshakeFailed, Refusal, WrongCall: as `join` does.
    """
    logs.listen()
    process.say_in_one_line()
    addresses = addresses_of(shards)
    check_who(run, learner_id, tls, token)
    check_seconds("wait_s", wait_s)
    credentials = Credentials(None if tls is None else Path(tls), token)
    name = credentials.learner_id(learner_id, run)
    process.check_may_join(run, name)
    began = time.monotonic()
    patience = Patience(Log(name), "waiting for a number", began)
    with ThreadPoolExecutor(1, "diloco-number") as thread:  # a notebook runs an event loop in the calling thread
        while True:
            found, missing = thread.submit(asyncio.run, _ask(addresses, credentials, Identity(run, name))).result()
            now = time.monotonic()
            if found is not None:
                break
            if wait_s is not None and now - began > wait_s:
                raise CannotConnect(f"no number after {wait_s:g} s: {missing}")
            patience.still(missing, now)
    patience.over(now)
    _taken[run, name] = found
    return found


def taken(run: str, learner_id: str) -> int | None:
    return _taken.get((run, learner_id))


async def _ask(addresses: Sequence[str], credentials: Credentials, caller: Identity) -> tuple[int | None, str]:
    """The number, or None and why it is missing. Raises ConfigError, HandshakeFailed and Refusal."""
    heard = await asyncio.gather(*(_ask_one(address, credentials, caller) for address in addresses))
    answers = [answer for answer in heard if isinstance(answer, JoinAnswer)]
    for answer in answers:
        if answer.shard_index == 0:
            return answer.index, ""
    if len(answers) == len(addresses):
        raise ConfigError("shard 0 is not among these shards; give the addresses of all shards of the run")
    return None, "; ".join(words for words in heard if isinstance(words, str))


async def _ask_one(address: str, credentials: Credentials, caller: Identity) -> JoinAnswer | str:
    transport = GrpcTransport(address, credentials, waits_for_shard=True)
    try:
        return await transport.join(caller, JoinRequest(PROTOCOL, "", take_number=True), ATTEMPT_S)
    except HandshakeFailed:
        raise
    except (Unavailable, Busy, Draining) as error:
        await asyncio.sleep(ATTEMPT_S / 4)
        return f"{address}: {error}"
    finally:
        await transport.close(0.0)

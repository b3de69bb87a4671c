"""`diloco record` asks a shard, and shows what it remembers as a table and as JSON lines."""

from __future__ import annotations

import asyncio
import json

import pytest

from builders import make_settings
from diloco_common.command import main
from diloco_common.observe.http import HttpServer
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.shard import ShardMetrics
from diloco_server.core.ledger import ANSWER_MAX, Merged, VersionCommitted
from diloco_server.shell.host import ShardHost
from diloco_server.shell.server import real_world
from diloco_server.shell.status import record_since
from diloco_server.storage.store import MemoryStore

EPOCH = 7
VERSIONS = ANSWER_MAX
"""With two learners each: two answers' worth."""
WHOSE = (Merged("ann", tokens=30, share=0.75, kept=1.0), Merged("bob", tokens=10, share=0.25, kept=0.8))
LEFT_OUT = Merged("carl", tokens=10, share=0.0, kept=1.0)


async def asked(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """The address of a shard with these versions, and what the command says of it."""
    metrics, log = ShardMetrics(), Log("test")
    host = ShardHost(make_settings(), MemoryStore(EPOCH), real_world(), metrics=metrics, log=log, clock=lambda: 0.0)
    for version in range(1, VERSIONS + 1):
        whose = (*WHOSE, LEFT_OUT) if version == VERSIONS else WHOSE
        host.shard.ledger.note(VersionCommitted(0, version, len(WHOSE), 40, 1.0, merged=whose), 0.0)

    def page(query: dict[str, str]) -> dict[str, object]:
        return record_since(host, int(query["epoch"]), int(query["after"]))

    server = HttpServer(
        "127.0.0.1:0", registry=metrics.registry, status=dict, ready=lambda: (True, ""), pages={"/record": page}
    )
    address = await server.start()
    try:
        assert await asyncio.to_thread(main, ["record", "--http", address, *options]) == 0
    finally:
        await server.stop()
    return address, capsys.readouterr().out


async def test_json_has_a_line_for_each_contribution_to_each_version(capsys: pytest.CaptureFixture[str]) -> None:
    address, said = await asked(capsys, "--json")
    lines = [json.loads(line) for line in said.splitlines()]
    assert [(one["version"], one["learner"]) for one in lines] == [
        *((version, one.learner_id) for version in range(1, VERSIONS + 1) for one in WHOSE),
        (VERSIONS, LEFT_OUT.learner_id),
    ]
    assert lines[1].pop("at") > 0
    assert lines[1] == {
        "shard": address, "epoch": EPOCH, "fragment": 0, "version": 1, "learner": "bob", "tokens": 10, "share": 0.25,
        "kept": 0.8,
    }  # fmt: skip


def test_a_shard_that_does_not_answer_is_an_error_and_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--http", "127.0.0.1:1"]) == 5
    assert capsys.readouterr().out == ""

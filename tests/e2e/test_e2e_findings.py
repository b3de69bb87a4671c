"""What is done to a cluster of processes is found by every view, with one code, and is over once it is undone.

The views are those of a person: what `diloco up` prints, its live page, `diloco status`, its JSON with --strict, and
`diloco doctor`. What else is found, and in which words: unit/test_findings.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from test_e2e_up import Up

from diloco_common.errors import EXIT_CANNOT_CONNECT, EXIT_TERMINATED
from diloco_common.trust.identity import subject_of
from diloco_common.wire.addresses import read_address
from diloco_deploy.show.status import EXIT_DEGRADED
from diloco_deploy.trust.authority import open_authority
from processes import DEADLINE_S, TINY, Process, Script, run_module, sets, until

DISK_BYTES = 8 * 2**20
SETTINGS = {"sync.quorum": 2, "lease.lease_s": 2, "lease.heartbeat_s": 0.5, "run.tokens": 0}

Found = set[tuple[str, str]]
"""Code and member."""


class Views:
    def __init__(self, up: Up) -> None:
        self._told = 0  # of what up has said
        self._up, self.members = up, dict[str, dict[str, Any]]()
        shown = until(lambda: re.search(r"(http://[^/\s]+)/(?:#key=(\S+))?", self.console()), "the address of the page")
        self._page = urllib.request.Request(f"{shown[1]}/events", headers={"Authorization": f"Bearer {shown[2]}"})

    def console(self) -> str:
        return self._up.log.read_text() if self._up.log.exists() else ""

    def json(self) -> Found:
        ended = self._status("--json", "--strict")
        if ended.returncode == EXIT_CANNOT_CONNECT:  # nobody is up yet
            return {("CANNOT_CONNECT", "")}
        said = json.loads(ended.stdout)
        self.members = {one["name"]: one["status"] or {} for one in said["members"]}
        found = {(one["code"], one["member"]) for one in said["problems"]}
        assert ended.returncode == (EXIT_DEGRADED if found else 0)
        return found

    def terminal(self) -> str:
        return self._status().stdout

    def page(self) -> Found:
        """The first that the page is told."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self._page) as stream:
            state = next(json.loads(line[5:]) for line in stream if line.startswith(b"data:"))
        return {(one["code"], one["member"]) for one in state["findings"]}

    def doctor(self) -> set[str]:
        ended = run_module("diloco_deploy", "doctor", "--folder", str(self._up.folder), "--json")
        return {one["code"] for one in json.loads(ended.stdout)["findings"] if one["check"] == "cluster"}

    def all_say(self, code: str, member: str) -> None:
        began, found, said = time.monotonic(), (code, member), self.console()
        looks: dict[str, Callable[[], bool]] = {
            "json": lambda: found in self.json(),
            "page": lambda: found in self.page(),
            "console": lambda: f"[{code}]" in self.console()[self._told :],
            "terminal": lambda: f"[{code}]" in self.terminal(),
            "doctor": lambda: code in self.doctor(),
        }

        def await_one(view: str) -> None:
            until(looks[view], f"{view} to say {found}; up said:\n{said}")
            print(f"{time.monotonic() - began:5.1f} s  {view} says {code}")

        with ThreadPoolExecutor(len(looks)) as pool:  # at the same time, as what one says may be over a moment later
            for waited in [pool.submit(await_one, view) for view in looks]:
                waited.result()

    @contextmanager
    def is_over(self, code: str, member: str) -> Iterator[None]:
        self._told, found = len(self.console()), (code, member)
        yield
        began = time.monotonic()
        until(lambda: found not in self.json() | self.page(), f"{found} to be over")
        until(lambda: f"{member}: {code} is over" in self.console()[self._told :], f"up to say that {found} is over")
        print(f"{time.monotonic() - began:5.1f} s  {code} is over")

    def _status(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return run_module("diloco_deploy", "status", "--folder", str(self._up.folder), *flags)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two shards and two workers that merge. Versions are on a small disk where one can be mounted."""
    folder = tmp_path_factory.mktemp("findings") / "run"
    disk = folder.with_name("disk")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    run = Up(folder, 2, 2, 0, **{**SETTINGS, "shard.data_dir": disk})
    try:
        run.await_merging()
        yield run
    finally:
        run.kill()
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


@contextmanager
def a_data_folder_is_gone(up: Up) -> Iterator[None]:
    data, elsewhere = (up.folder.with_name("disk") / name for name in ("shard-1", "elsewhere"))
    data.rename(elsewhere)
    yield
    elsewhere.rename(data)


@contextmanager
def a_disk_is_full(up: Up) -> Iterator[None]:
    ballast = up.folder.with_name("disk") / "ballast"
    if not ballast.parent.is_mount():
        pytest.skip("no tmpfs can be mounted here (root can)")
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    yield
    ballast.unlink()


@contextmanager
def a_worker_is_frozen(up: Up) -> Iterator[None]:
    """The other one alone is too few for a round."""
    address = read_address(up.folder / "run" / "worker-1.json")
    assert address is not None
    (frozen,) = (child for child in up.children if child.pid == address.pid)
    frozen.suspend()
    yield
    frozen.resume()


JOINS = """
import sys, time
import torch
from diloco_common.settings import ModelSettings
from diloco_demo.data import TokenStream, load_corpus
from diloco_demo.gpt import build_gpt
from diloco_worker import join

model = build_gpt(ModelSettings.model_validate_json(sys.argv[4]), seed=0)
with join(sys.argv[2].split(","), model, run=sys.argv[3], learner_id=sys.argv[1]) as learner:
"""
LONG_STEP = """
    time.sleep(600)
"""
BACKWARDS = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, maximize=True)
    stream = TokenStream(load_corpus("stdlib").train, learner_id="a", seed=0, context=model.context, batch=4)
    while True:
        inputs, targets = stream.next_batch()
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=inputs.numel(), loss=loss)
        time.sleep(0.02)
"""


@contextmanager
def a_script_runs(up: Up, name: str, text: str) -> Iterator[None]:
    """A learner, until SIGTERM ends it."""
    addresses, run = ",".join(up.grpc(shard) for shard in up.shards), up.status("shard-0")["run"]
    model = {key.removeprefix("model."): value for key, value in TINY.items() if key.startswith("model.")}
    folder = up.folder.with_name(name)
    folder.mkdir()
    with Script(JOINS + text, name, addresses, run, json.dumps(model), folder=folder) as one:
        await_learner(up, name)
        yield
        one.send_signal(signal.SIGTERM)
        assert one.wait(DEADLINE_S) == EXIT_TERMINATED, one.err


def one_is_in_a_long_step(up: Up) -> AbstractContextManager[None]:
    return a_script_runs(up, "slow", LONG_STEP)


def one_trains_backwards(up: Up) -> AbstractContextManager[None]:
    return a_script_runs(up, "backwards", BACKWARDS)


@contextmanager
def pushes_are_refused_on_the_way(up: Up) -> Iterator[None]:
    """By a proxy that takes a megabyte at most, as nginx does unless told otherwise."""
    with (
        relays([up.grpc(name) for name in up.shards]) as (addresses, refuse),
        another_worker(up, "behind", addresses) as one,
    ):
        refuse(True)
        yield
        refuse(False)
        one.signal(signal.SIGTERM)
        one.exit_code()


@contextmanager
def another_worker(up: Up, name: str, shards: list[str], **settings: object) -> Iterator[Process]:
    given = {**TINY, **SETTINGS, "worker.learner_id": name, "run.id": up.status("shard-0")["run"], **settings}
    one = Process(
        name, "diloco_demo", lambda: [f"--shards={','.join(shards)}", *sets(given)], up.folder.with_name(name)
    )
    one.start()
    try:
        await_learner(up, name)
        yield one
    finally:
        one.kill()


def await_learner(up: Up, name: str) -> None:
    until(lambda: any(one["id"] == name for one in up.status("shard-0")["learners"]), f"{name} to join")


@contextmanager
def relays(addresses: list[str]) -> Iterator[tuple[list[str], Callable[[bool], None]]]:
    """Their addresses, and what lets pushes fail with HTTP 413."""
    refuses = [False]
    loop, found = asyncio.new_event_loop(), list[str]()

    async def serve() -> None:
        for address in addresses:
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((_Relay(grpc.aio.insecure_channel(address), refuses),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            found.append(f"127.0.0.1:{port}")
            servers.append(server)

    async def stop() -> None:
        for server in servers:
            await server.stop(0)

    servers: list[Any] = []
    thread = threading.Thread(target=loop.run_forever, name="relays", daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result()
    try:
        yield found, lambda wanted: refuses.__setitem__(0, wanted)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class _Relay(grpc.GenericRpcHandler):
    """Passes every call on, but for pushes."""

    def __init__(self, channel: grpc.aio.Channel, refuses: list[bool]) -> None:
        self._channel, self._refuses = channel, refuses

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def relay(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if call.method.endswith("/Push") and self._refuses[0]:
                await context.abort(grpc.StatusCode.UNKNOWN, "Received http2 header with status: 413")
            try:
                passed = self._channel.stream_stream(call.method)(
                    requests, metadata=call.invocation_metadata, timeout=context.time_remaining()
                )
                async for answer in passed:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))

        return grpc.stream_stream_rpc_method_handler(relay)


Done = Callable[[Up], AbstractContextManager[None]]
TABLE: list[tuple[Done, str, str]] = [
    (a_data_folder_is_gone, "STORAGE", "shard-1"),
    (one_is_in_a_long_step, "STALLED", "slow"),
    (a_disk_is_full, "STORAGE", "shard-0"),
    (a_worker_is_frozen, "WORKER_AWAY", "worker-1"),
    (a_worker_is_frozen, "NO_PROGRESS", "shard-0"),
    (pushes_are_refused_on_the_way, "PUSHES_FAIL", "behind"),
    (one_trains_backwards, "LEFT_OUT", "backwards"),
]
AT_THE_GATE = TABLE[2:]


@pytest.mark.parametrize(
    ("done", "code", "member"),
    [
        pytest.param(*row, marks=[pytest.mark.gate] * (row in AT_THE_GATE), id=f"{row[0].__name__} {row[1]}")
        for row in TABLE
    ],
)
def test_every_view_finds_it_and_that_it_is_over(up: Up, done: Done, code: str, member: str) -> None:
    views = Views(up)
    until(lambda: not views.json() and not views.page(), "all to be well")
    with views.is_over(code, member), done(up):
        views.all_say(code, member)


@pytest.mark.gate
def test_every_view_finds_certificates_that_are_revoked_and_that_expire(tmp_path: Path) -> None:
    run = Up(tmp_path / "run", 1, 2, 0, **SETTINGS, **{"shard.http": "0.0.0.0:0", "worker.http": "0.0.0.0:0"})

    def certs(*words: str) -> None:
        assert run_module("diloco_deploy", "certs", *words, "--folder", str(run.folder / "certs")).returncode == 0

    try:
        views = Views(run)
        until(lambda: not views.json() and views.members["shard-0"].get("rounds", 0) >= 4, "rounds")
        with views.is_over("REVOKED", "worker-1"):
            certs("revoke", "learner/worker-1")
            views.all_say("REVOKED", "worker-1")
            certs("issue", "learner/worker-1")
        with views.is_over("CERTIFICATE_ENDS_SOON", "shard-0"):
            authority = open_authority(run.folder / "certs")
            shard, a_minute = subject_of(authority.run_id, "shard/0"), 1 / 1440
            authority.issue(shard, datetime.now(UTC), hosts=["127.0.0.1"], days=a_minute)
            views.all_say("CERTIFICATE_ENDS_SOON", "shard-0")
        with views.is_over("EXPIRED", "shard-0"):
            views.all_say("EXPIRED", "shard-0")
            assert "nobody can call this shard" in (run.folder / "logs" / "shard-0.log").read_text()
            certs("issue", "shard/0", "--host", "127.0.0.1")
    finally:
        run.kill()

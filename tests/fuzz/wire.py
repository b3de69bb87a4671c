"""Calls of a real shard over loopback: any bodies, any metadata, headers and chunks in any order; and raw HTTP.

The shard has a model, and two learners that report and are asked for contributions but send none. So a push with the
right header is wanted, and what is wrong with it is found where that is looked at.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import messages
import psutil
import torch
from attack import Credential, Target
from fuzzing import NUMBERS, RSS_MORE, STUCK_S, TEXTS, Finding, Result, chance_of, mutated, number, shown
from intruder import SERVICE, Asked, Mole, refused
from scene import ShardProcess

from builders import chunk_request, push_bodies
from diloco_common.codec import encode_payload
from diloco_common.codec.frames import frame_of
from diloco_common.errors import Busy, Refusal
from diloco_common.wire import protobuf
from diloco_common.wire.manifest import TensorSpec, cut
from diloco_protos import parameter_server_pb2 as pb

REQUESTS: dict[str, type[Any]] = {
    "Join": pb.JoinRequest, "Attend": pb.Progress, "Push": pb.PushRequest, "Pull": pb.PullRequest,
    "Leave": pb.LeaveRequest,
}  # fmt: skip
TENSORS = (TensorSpec("a.bias", (5,)), TensorSpec("a.weight", (60, 10)), TensorSpec("b.weight", (600,)))
SETTINGS = {
    "sync.fragments": 2, "sync.sync_every": 1, "sync.quorum": 2, "lease.lease_s": 3, "lease.heartbeat_s": 0.5,
}  # fmt: skip
TOKEN = "a token for fuzzing".replace(" ", "-")
HEADERS = (
    "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "Accept", "Authorization", "Expect", "A" * 500,
)  # fmt: skip
AT_ONCE = 16
JOIN_TRIES = 20
CODES = {kind.code for kind in Refusal.__subclasses__()} | {"OK", "ACCEPTED", "PART", "DUPLICATE", "LATE"}
"""PART: a Join before it had said that the learner has several ranks (docs/wire-format.md)."""
WORDS_MAX = 2048
"""Bytes of a refusal."""
T = TypeVar("T")


@dataclass
class Call:
    """One call, as drawn; what only the shard knows is filled in when it is made."""

    method: str
    bodies: list[bytes | Callable[[Learner], bytes]]
    wrong: dict[str, str | None] = field(default_factory=dict)
    """Metadata that differs from the right ones; None: it is left out."""
    leased: bool = True

    def __repr__(self) -> str:
        said = [body.hex() if isinstance(body, bytes) else "(a right push)" for body in self.bodies]
        return f"{self.method} {self.wrong} {said}"


class Learner(Mole):
    """Reports, and hears what is asked; after the seeds of its model it contributes nothing."""

    def __init__(self, shard: ShardProcess, learner_id: str) -> None:
        super().__init__(Target(shard.endpoints.grpc, shard.endpoints.http, Credential(TOKEN)), learner_id)
        self.tensors, self.report_every_s, self.steps_per_report = TENSORS, 0.01, 1
        self.rounds: dict[int, int] = {}
        """Fragment -> the round that asked last."""

    def hear(self, asked: Asked) -> None:
        self.rounds[asked.fragment.fragment_id] = asked.header.round

    def seed(self) -> None:
        for fragment in self.fragments.values():
            header = pb.PushHeader(fragment_id=fragment.fragment_id, epoch=self.epoch, manifest_digest=self.digest)
            self.push_bytes(push_bodies(header, encode_payload(torch.full((fragment.num_elements,), 0.1), "float32")))


@contextmanager
def learners(shard: ShardProcess) -> Iterator[list[Learner]]:
    """Two that go on in the background."""
    over, made = threading.Event(), [Learner(shard, f"fuzz-{index}") for index in range(2)]
    for one in made:
        one.join()
    made[0].seed()
    threads = [threading.Thread(target=one.work, args=(one.hear, over.is_set), daemon=True) for one in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        over.set()
        for thread in threads:
            thread.join()


def draw_call(chance: random.Random) -> Call:
    method = chance.choice([*REQUESTS, "Push", "Push"])
    call = Call(method, _bodies(chance, method), leased=method != "Join" or chance.random() < 0.1)
    if chance.random() < 0.15:
        key = chance.choice(("authorization", "diloco-run", "diloco-learner", "diloco-generation", "diloco-epoch"))
        value = chance.choice((*TEXTS, *map(str, NUMBERS), "-1", "1e3", " 7", "Bearer x", f"Bearer {TOKEN}x"))
        call.wrong[key] = None if chance.random() < 0.2 else "".join(c for c in value if " " <= c <= "~")[:9000]
    return call


def _bodies(chance: random.Random, method: str) -> list[bytes | Callable[[Learner], bytes]]:
    if method != "Push" or chance.random() < 0.3:
        kind = REQUESTS[method]
        return [messages.body(chance, kind) for _ in range(chance.choice((0, 1, 1, 1, 2, 5)))]
    return _push(chance)


def _push(chance: random.Random) -> list[bytes | Callable[[Learner], bytes]]:
    """A right push of which something is changed."""
    manifest = cut(TENSORS, 2, 1)
    fragment = manifest.fragments[chance.randrange(2)]
    encoding = chance.choice(("int8", "int8", "int8", "float32"))
    values = torch.full((fragment.num_elements,), chance.choice((0.0, 1e-3, 1.0, 1e30)))
    payload = encode_payload(values, encoding, chunk_elements=chance.choice((256, 256, 2**20)))
    header = pb.PushHeader(
        fragment_id=fragment.fragment_id, tokens=1, steps=1, payload=protobuf.to_pb(payload.header),
        round=0 if encoding == "float32" else 1,
    )  # fmt: skip
    spoiled = chance.choice((None, None, None, *header.DESCRIPTOR.fields_by_name, "tokens", "payload", "payload"))
    extreme = messages.drawn(chance, pb.PushHeader)
    if spoiled == "payload" and chance.random() < 0.8:
        name = chance.choice([*header.payload.DESCRIPTOR.fields_by_name])
        setattr(header.payload, name, getattr(messages.drawn(chance, pb.Payload), name))
    elif spoiled == "payload":
        header.payload.CopyFrom(extreme.payload)  # type: ignore[attr-defined]
    elif spoiled == "ranges":
        header.ranges.extend(extreme.ranges)  # type: ignore[attr-defined]
    elif spoiled is not None:
        setattr(header, spoiled, getattr(extreme, spoiled))

    def right(lease: Learner) -> bytes:
        """What only the shard knows, where that is not what is spoiled."""
        said = pb.PushHeader()
        said.CopyFrom(header)
        if spoiled != "manifest_digest":
            said.manifest_digest = lease.digest
        if spoiled != "epoch":
            said.epoch = lease.epoch
        if spoiled != "round" and said.round:
            said.round = lease.rounds.get(fragment.fragment_id, 1)
            if spoiled != "base_version":
                said.base_version = said.round - 1
        return pb.PushRequest(header=said).SerializeToString()

    chunks = [bytes(chunk) for chunk in payload.chunks]
    if chance.random() < 0.3:
        at = chance.randrange(len(chunks))
        chunks[at] = mutated(chance, chunks[at])
    bodies: list[bytes | Callable[[Learner], bytes]] = [right]
    bodies += [
        frame_of(chunk) if chance.random() < 0.5 else chunk_request(chunk).SerializeToString() for chunk in chunks
    ]
    match chance.randrange(10):
        case 0:
            bodies = bodies[::-1]
        case 1:
            bodies.insert(chance.randrange(len(bodies)), chance.choice(bodies))
        case 2:
            del bodies[chance.randrange(len(bodies)) :]
        case 3:
            bodies.append(messages.body(chance, pb.PushRequest))
        case 4:
            bodies += [pb.PushRequest(chunk=bytes(number(chance, 16))).SerializeToString()]
    return bodies


def draw_http(chance: random.Random) -> bytes:
    """A request of HTTP, or something like one."""
    method = chance.choice(("GET", "GET", "HEAD", "POST", "PUT", "get", "PRI", "CONNECT", "", "\x00"))
    path = chance.choice(
        ("/status", "/metrics", "/healthz", "/readyz", "/", "/../..", "*", "http://x/", "/%00", "/\x1b")
    )
    version = chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    pairs = [("Host", "x")] if chance.random() < 0.9 else []
    for _ in range(chance.choice((0, 0, 1, 2, 200))):
        name = chance.choice(HEADERS)
        pairs.append((name, chance.choice(("0", "-1", "5", "18446744073709551616", "chunked", "gzip", *TEXTS))))
    if chance.random() < 0.3:
        path += chance.choice(("?a=b", "?name[]=a&name[]=b", "?" + "a" * 70_000, "\xe9", "#x"))
    text = f"{method} {path} {version}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in pairs) + "\r\n"
    data = text.encode("latin-1", "replace") + chance.choice(
        (b"", b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"ZZ\r\n")
    )
    if chance.random() < 0.1:
        return chance.randbytes(chance.choice((0, 1, 100, 100_000)))
    return mutated(chance, data) if chance.random() < 0.4 else data


def fuzz_calls(folder: Path, seed: int, numbers: range) -> Result:
    """Calls, by a few at once. What is wrong with the shard afterwards is a finding, too."""
    return _with_shard("calls", folder, seed, numbers, _calls)


def fuzz_http(folder: Path, seed: int, numbers: range) -> Result:
    return _with_shard("http", folder, seed, numbers, _requests)


def _with_shard(
    part: str, folder: Path, seed: int, numbers: range,
    offer: Callable[[ShardProcess, Result, int, range], Awaitable[None]],
) -> Result:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    result, shard = Result(), ShardProcess(folder, SETTINGS, TOKEN)
    try:
        process = psutil.Process(shard.pid)

        before = process.memory_info().rss
        asyncio.run(offer(shard, result, seed, numbers))
        if (more := process.memory_info().rss - before) > RSS_MORE:
            result.found(Finding(part, seed, numbers.stop, f"RSS + {more / 2**20:.0f} MiB", ""), "memory")
        for why in _wrong_with(shard):
            result.found(Finding(part, seed, numbers.stop, why, str(shard.log)))
    finally:
        shard.kill()
    return result


def _wrong_with(shard: ShardProcess) -> list[str]:
    if not shard.alive:
        return [f"the shard has ended: {shard.said()[-2000:]}"]
    problems = [] if shard.status() else ["the shard has no status any more"]
    said = shard.said()
    if "Traceback" in said:
        at = said.index("Traceback")
        problems.append(f"{said.count('Traceback')} tracebacks in the log, the first: {said[at : at + 3000]}")
    if any(ord(c) < 32 and c != "\n" for c in said):
        problems.append("control characters in the log")
    afterwards = Learner(shard, "afterwards")  # on a connection of its own: the other one has no joins left
    for _ in range(JOIN_TRIES):  # the host may wait for some
        if (answer := afterwards.join()).code != Busy.code:
            break
        time.sleep(0.5)
    if answer.code != "OK":
        problems.append(f"nobody can join any more: {answer.code} {answer.details}")
    return problems


async def _calls(shard: ShardProcess, result: Result, seed: int, numbers: range) -> None:
    loop = asyncio.get_running_loop()
    where = shard.endpoints.grpc
    with learners(shard) as known, ThreadPoolExecutor(AT_ONCE) as pool, grpc.insecure_channel(where) as channel:

        async def one(at: int) -> None:
            call = draw_call(chance_of("calls", seed, at))
            code, words = await loop.run_in_executor(pool, _offer, channel, call, known[at % len(known)])
            kind = "" if code in CODES else f"{call.method} ended with {code}"
            if not kind and len(words.encode()) > WORDS_MAX:
                kind = f"{code} of {call.method} has more than {WORDS_MAX} bytes of words"
            if kind:
                result.found(Finding("calls", seed, at, f"{kind}: {words[:200]}", shown(call)), kind)
            else:
                result.answers[code] += 1

        await _in_batches(one, numbers)


async def _in_batches(one: Callable[[int], Awaitable[None]], numbers: range) -> None:
    for first in range(numbers.start, numbers.stop, 1024):
        await asyncio.gather(*(one(at) for at in range(first, min(first + 1024, numbers.stop))))


def _offer(channel: grpc.Channel, call: Call, lease: Learner) -> tuple[str, str]:
    """The stable code, and the words of a refusal. Not by grpc.aio, which loses answers (grpc/grpc#36066)."""
    bodies = [body if isinstance(body, bytes) else body(lease) for body in call.bodies]
    made = channel.stream_stream(SERVICE + call.method)(
        iter(bodies), metadata=metadata_of(call, lease), timeout=STUCK_S
    )
    try:
        last = b""
        for answer in made:
            last = bytes(answer)
        if call.method != "Push":
            return "OK", ""
        said = pb.PushResponse.FromString(last)
        return said.code or pb.PushResponse.Outcome.Name(said.outcome), said.message
    except grpc.RpcError as error:
        answer = refused(error)
        return answer.code, answer.details


def metadata_of(call: Call, lease: Learner) -> list[tuple[str, str]]:
    right = {"authorization": f"Bearer {TOKEN}", "diloco-run": "local", "diloco-learner": lease.learner_id}
    if call.method in ("Join", "Leave"):
        right["diloco-learner"] = f"other-{lease.generation % 7}"
    if call.leased:
        right |= {"diloco-generation": str(lease.generation), "diloco-epoch": str(lease.epoch)}
    pairs = right | call.wrong
    return [(key, value) for key, value in pairs.items() if value is not None]


async def _requests(shard: ShardProcess, result: Result, seed: int, numbers: range) -> None:
    places = asyncio.Semaphore(AT_ONCE)
    host, _, port = shard.endpoints.http.rpartition(":")

    async def one(at: int) -> None:
        async with places:
            data = draw_http(chance_of("http", seed, at))
            try:
                async with asyncio.timeout(STUCK_S):
                    code = await _ask(host, int(port), data)
            except TimeoutError:
                code = "nothing for too long"
            if code in ("closed", "200", "400", "401", "403", "404", "405", "408", "413", "414", "431", "501", "503"):
                result.answers[code] += 1
            else:
                result.found(Finding("http", seed, at, f"answered {code}", shown(data)))

    await _in_batches(one, numbers)


async def _ask(host: str, port: int, data: bytes) -> str:
    """The HTTP status that comes back; "closed" if the connection is closed without one."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        answer = await reader.read(1 << 20)
        while await reader.read(1 << 20):
            pass
        return answer.split(b" ", 2)[1].decode("latin-1")[:40] if answer else "closed"
    except OSError:
        return "closed"
    finally:
        writer.close()

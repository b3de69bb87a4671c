"""Checks the connection to a shard, from its name and port to TLS, then its version, clock, and bandwidth.

Its calls only read, as an observer with the caller's credentials: Join as an observer, Pull of one fragment until
enough bytes arrived, and Probe.Measure: each within the shard's limits and limits of its own.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import grpc

from diloco_common import formulas, units
from diloco_common.errors import DilocoError, HandshakeFailed, NotSeeded, Unavailable
from diloco_common.formulas import BITS, LINK_SHARE
from diloco_common.settings import SyncSettings
from diloco_common.trust.files import TlsFiles, shown
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.addresses import parse_address
from diloco_common.wire.handshake import certificate_at, find_cause
from diloco_common.wire.messages import (
    PROBE_BYTES_MAX,
    PROBE_MESSAGE_BYTES,
    PROBE_S,
    JoinAnswer,
    JoinRequest,
    PullRequest,
)
from diloco_deploy import ASK_S
from diloco_deploy.cluster.findings import ENDS_SOON_S, SKEW_S
from diloco_deploy.doctor.checks import (
    MEASURE_S,
    SLOW_S,
    TIMES,
    Door,
    Known,
    MeasuredShard,
    ReportLine,
    failure,
    of_error,
    ok,
    warning,
)
from diloco_protos import parameter_server_pb2 as pb

ENDS_SOON = timedelta(seconds=ENDS_SOON_S)


def name(address: str) -> ReportLine:
    """Whether the host name resolves here."""
    host = parse_address(address).host
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return failure("NAME_UNKNOWN", f"{host} has no address on this machine: {error.strerror or error}")
    return ok(f"{host} is {', '.join(sorted(found)[:4])}")


def port(address: str, dial_s: float = ASK_S) -> ReportLine:
    """Whether the port is open, and how long a round trip takes."""
    wanted = parse_address(address)
    trips: list[float] = []
    for _ in range(TIMES):
        began = time.monotonic()
        try:
            socket.create_connection((wanted.host, wanted.port), dial_s).close()
        except ConnectionRefusedError:
            return failure("PORT_CLOSED", f"{wanted.host} refuses connections to port {wanted.port}: nobody listens")
        except TimeoutError:
            return failure(
                "PORT_SILENT", f"no answer from {address} within {dial_s:g} s, not even a refusal: packets are dropped"
            )
        except OSError as error:
            return failure("PORT_SILENT", f"{address} cannot be reached: {error.strerror or error}")
        trips.append(time.monotonic() - began)
    return round_trip(address, min(trips))


def round_trip(address: str, seconds: float) -> ReportLine:
    what = f"{address} answers; a round trip takes {1000 * seconds:.3g} ms"
    if seconds > SLOW_S:
        return warning("LINK_FAR", what, round_trip_s=seconds)
    return ok(what, round_trip_s=seconds)


def handshake(
    address: str, files: TlsFiles | None,
    cause_at: Callable[[str, TlsFiles | None], HandshakeFailed | None] = find_cause,
) -> Sequence[ReportLine]:  # fmt: skip
    """Whether TLS works, and for how long the certificates are valid."""
    cause = cause_at(address, files)
    if cause is not None:
        return [of_error(cause)]
    if files is None:
        return [ok(f"{address} is called in plaintext")]
    certificate = certificate_at(address)
    ends = {f"the certificate of {address}": certificate.not_valid_after_utc} if certificate is not None else {}
    if files.certificate is not None:
        ends[f"the certificate in {files.folder} ({files.subject})"] = files.certificate.not_valid_after_utc
    now = datetime.now(UTC)
    return [validity(whose, until, now) for whose, until in ends.items()] or [ok(f"{address} speaks TLS")]


def validity(whose: str, until: datetime, now: datetime) -> ReportLine:
    what = f"{whose} holds until {shown(until)}"
    return warning("CERTIFICATE_ENDS_SOON", what) if until - now < ENDS_SOON else ok(what)


SKEW_MOST_S = 6 * SKEW_S
"""Difference of clocks that is a failure if certificates depend on it; beyond `SKEW_S` it is a warning."""


def describe(door: Door, known: Known, protocol: int) -> Sequence[ReportLine]:
    """Whether a shard accepts us, and the run it serves. Raises its Refusal."""
    try:
        answer = join_answer(door, protocol)
    except NoShard as error:
        return [failure("NOT_A_SHARD", f"{door.address} does not speak our protocol ({error})")]
    except Silence:
        return [failure("NO_ANSWER", f"{door.address} takes connections, and answers no call in {ASK_S:g} s")]
    except NotSeeded:
        return [ok(f"a shard of run {door.run_id} that waits for its first learner; protocol {protocol}")]
    known.answers[door.address] = answer
    params = _params(answer)
    model = f"{units.count(params)} parameters" if params else "no model yet"
    return [
        ok(
            f"shard {answer.shard_index} of {answer.num_shards} of run {door.run_id}: {model}, "
            f"{answer.pulse.learners_alive} learners, protocol {protocol}"
        )
    ]


def complete(known: Known) -> ReportLine:
    """Whether all shards of the run were named."""
    if not known.answers:
        return ok("which shards the run has is known once a learner has joined")
    found = {answer.shard_index for answer in known.answers.values()}
    count = max((answer.num_shards for answer in known.answers.values()), default=0)
    missing = sorted(set(range(count)) - found)
    if missing:
        return failure(
            "SHARDS_MISSING", f"the run has {count} shards; not named, or not reached: {', '.join(map(str, missing))}"
        )
    return ok(f"all {count} shards of the run were reached")


def measure(door: Door, known: Known) -> ReportLine:
    """Check the shard's clock, and keep its version and upload rate for `version` and `link`. Raises its Refusal."""
    try:
        measured = probed(door)
    except (NoShard, Unavailable) as error:
        return no_bytes(door.address, str(error))
    except Silence:
        return failure("NO_ANSWER", f"{door.address} does not answer a probe")
    known.measured[door.address] = measured
    proven = door.files is not None or door.token is not None
    return clock(door.address, measured.skew_s + known.round_trip_s.get(door.address, 0.0) / 2, proven=proven)


def no_bytes(address: str, why: str) -> ReportLine:
    """The finding if a probe fails although small messages get through: pushes would fail as well."""
    if why.startswith("unimplemented") and "http2 header" not in why:
        return warning("CLOCK_UNKNOWN", f"{address} is of a version before `diloco doctor`")
    return failure("PUSHES_FAIL", f"bytes do not get through to {address}, though small messages do ({why})")


def version(door: Door, known: Known, ours: str) -> Sequence[ReportLine]:
    """Whether the shard runs our version. Empty if it did not report its own."""
    measured = known.measured.get(door.address)
    return [] if measured is None else [package(door.address, measured.package, ours)]


def clock(address: str, skew_s: float, *, proven: bool) -> ReportLine:
    """The finding for a shard's clock that is `skew_s` seconds ahead of ours."""
    what = (
        f"the clock of {address} is {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        if abs(skew_s) >= 1
        else f"the clocks of {address} and this machine agree within a second"
    )
    if abs(skew_s) > SKEW_MOST_S and proven:
        return failure("CLOCK_SKEWED", what, clock_skew_s=skew_s)
    return warning("CLOCK_SKEWED", what, clock_skew_s=skew_s) if abs(skew_s) > SKEW_S else ok(what, clock_skew_s=skew_s)


def package(address: str, theirs: str, ours: str) -> ReportLine:
    if theirs == ours:
        return ok(f"{address} runs {theirs}, as this machine does")
    return warning("PACKAGES_DIFFER", f"{address} runs {theirs}, this machine {ours}")


def link(door: Door, known: Known, step_s: float, params: float | None) -> ReportLine:
    """The bandwidth of the link, and the settings it allows. Raises a Refusal."""
    measured, answer = known.measured.get(door.address), known.answers.get(door.address)
    up = None if measured is None else measured.up
    if answer is None:
        return warning("LINK_UNMEASURED", f"{_rates(up, None)}; the run has no model yet, so nothing comes down")
    seeded = next((fragment for fragment in answer.fragments if fragment.seeded), None)
    down = None if seeded is None else pull_rate(door, seeded.fragment_id)
    params = params or float(_params(answer))
    if up is None and down is None:
        return warning("LINK_UNMEASURED", f"the bandwidth to {door.address} was not measured: too few bytes arrived")
    return advice(up or down or 0.0, down or up or 0.0, answer, params, step_s, _rates(up, down))


def advice(up: float, down: float, answer: JoinAnswer, params: float, step_s: float, measured: str) -> ReportLine:
    """The settings that a link allows, compared with the run's. `up`, `down`: bits per second."""
    # Companions double the parameters. Shards do not report how rarely they travel, but never more often.
    moved = params * (1 if all(tensor.traits.is_of_model for tensor in answer.tensors) else 2)
    policy, defaults = answer.policy, SyncSettings()
    every, push, pull = policy.sync_every, policy.push_encoding, policy.pull_encoding
    share = max(
        formulas.rate(moved, BITS.get(encoding, 32.0), every, step_s) / rate
        for encoding, rate in ((push, up), (pull, down))
    )
    asks = (
        f"{measured}; at {step_s:g} s per step the run asks for {share:.0%} of it "
        f"(H = {every}, {push} up, {pull} down, {units.count(params)} parameters)"
    )
    enough = max(
        formulas.every_for_rate(moved, BITS[encoding], rate, step_s, LINK_SHARE)
        for encoding, rate in ((defaults.push, up), (defaults.pull, down))
    )
    proposal = f"sync_every = {max(defaults.first_every, enough)}, push = {defaults.push}, pull = {defaults.pull}"
    figures = {"up_bits_per_s": up, "down_bits_per_s": down, "share": share}
    slowest = share * step_s / LINK_SHARE
    do = f"this link allows {proposal}. As the run is set, it is enough for steps of {slowest:.3g} s or longer"
    if share > 1:
        return failure("LINK_THIN", asks, do, **figures)
    if share > LINK_SHARE:
        return warning("LINK_THIN", asks, do, **figures)
    return ok(f"{asks}. It allows {proposal}", **figures)


def _params(answer: JoinAnswer) -> int:
    return sum(tensor.num_elements for tensor in answer.tensors if tensor.traits.is_of_model)


def _rates(up: float | None, down: float | None) -> str:
    found = [f"{units.bit_rate(rate)} {way}" for rate, way in ((up, "up"), (down, "down")) if rate is not None]
    return ", ".join(found) or "nothing measured"


T = TypeVar("T")

DOWN_BYTES_MAX = 16 << 20
PACKAGE_CHARACTERS_MAX = 64
ENOUGH_BYTES = 64 << 10
"""Fewest bytes from which a bandwidth is computed."""


class NoShard(Exception):
    """Something other than a shard answers; the message has gRPC's words."""


class Silence(Exception):
    """The connection is open, but no answer comes."""


def join_answer(door: Door, protocol: int) -> JoinAnswer:
    """The shard's description of the run. Raises its Refusal, NoShard, Silence."""
    request = JoinRequest(protocol, "", observe=True)

    async def ask(channel: grpc.aio.Channel) -> JoinAnswer:
        join = channel.unary_unary(
            f"/{rpc.SERVICE}/Join", request_serializer=protobuf.serialize,
            response_deserializer=pb.JoinResponse.FromString,
        )  # fmt: skip
        return protobuf.join_answer_from_pb(
            await join(protobuf.to_pb(request), metadata=_metadata(door), timeout=ASK_S)
        )

    return _called(door, ask)


def probed(door: Door) -> MeasuredShard:
    """Measure upload rate, clock and package of a shard. Raises Refusal, NoShard (it has no Probe), Silence."""

    async def ask(channel: grpc.aio.Channel) -> MeasuredShard:
        probe = channel.stream_unary(
            f"/{rpc.PROBE}/Measure", request_serializer=protobuf.serialize,
            response_deserializer=pb.ProbeResponse.FromString,
        )  # fmt: skip
        answer = await probe(_zeros(), metadata=_metadata(door), timeout=ASK_S + PROBE_S)
        came = time.time()
        enough = answer.num_bytes >= ENOUGH_BYTES and answer.seconds > 0
        up = 8 * answer.num_bytes / answer.seconds if enough else None
        return MeasuredShard(up, answer.clock - came, answer.package[:PACKAGE_CHARACTERS_MAX])

    return _called(door, ask)


def pull_rate(door: Door, fragment_id: int) -> float | None:
    """Download rate in bits per second; None: the fragment is too small to tell. Raises Refusal, NoShard, Silence."""
    request = protobuf.to_pb(PullRequest(fragment_id))

    async def ask(channel: grpc.aio.Channel) -> float | None:
        pull = channel.unary_stream(f"/{rpc.SERVICE}/Pull", request_serializer=protobuf.serialize)
        call = pull(request, metadata=_metadata(door), timeout=ASK_S + MEASURE_S)
        num_bytes, began, last = -1, 0.0, 0.0
        try:
            async with asyncio.timeout(ASK_S + MEASURE_S):
                while (part := await call.read()) is not rpc.EOF:
                    last = time.monotonic()
                    if num_bytes < 0:  # the header: the clock starts
                        num_bytes, began = 0, last
                        continue
                    num_bytes += len(part)
                    if num_bytes >= DOWN_BYTES_MAX or last - began > MEASURE_S:
                        break
        except TimeoutError:
            pass
        finally:
            call.cancel()
        return 8 * num_bytes / (last - began) if num_bytes >= ENOUGH_BYTES and last > began else None

    return _called(door, ask)


async def _zeros() -> AsyncIterator[pb.ProbeRequest]:
    message = pb.ProbeRequest(zeros=bytes(PROBE_MESSAGE_BYTES - 16))
    for _ in range(PROBE_BYTES_MAX // PROBE_MESSAGE_BYTES + 1):
        yield message


def _metadata(door: Door) -> tuple[tuple[str, str], ...]:
    return rpc.metadata_of(Identity(door.run_id), door.token)


def _called(door: Door, ask: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
    async def call() -> T:
        channel = rpc.channel(door.address, door.files, rpc.BULK_CHANNEL_OPTIONS)
        try:
            return await ask(channel)
        except grpc.aio.AioRpcError as error:
            raise _cause(error) from None
        finally:
            await channel.close(0.0)

    return asyncio.run(call())


def _cause(error: grpc.aio.AioRpcError) -> Exception:
    if (refusal := rpc.refusal_of(error)) is not None:
        return refusal
    words = f"{error.code().name.lower()}: {(error.details() or '')[:200]}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or "timed out before receiving SETTINGS" in words:
        return Silence(words)
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL):
        return NoShard(words)
    found: DilocoError = Unavailable(words)
    return found

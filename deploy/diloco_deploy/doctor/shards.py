"""Checks the connection to a shard, from its name and port to TLS, then its clock and version.

Its one call only reads: a Join as an observer, with the caller's credentials.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import grpc

from diloco_common import units
from diloco_common.errors import DilocoError, HandshakeFailed, NotSeeded, Unavailable
from diloco_common.trust.files import TlsFiles, shown
from diloco_common.trust.identity import Identity
from diloco_common.wire import protobuf, rpc
from diloco_common.wire.addresses import parse_address
from diloco_common.wire.handshake import certificate_at, find_cause
from diloco_common.wire.messages import JoinAnswer, JoinRequest
from diloco_deploy import ASK_S
from diloco_deploy.cluster.findings import ENDS_SOON_S, SKEW_S
from diloco_deploy.doctor import (
    SLOW_S,
    TIMES,
    Door,
    Known,
    ReportLine,
    ToldOfItself,
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
    what = f"{whose} is valid until {shown(until)}"
    return warning("CERTIFICATE_ENDS_SOON", what) if until - now < ENDS_SOON else ok(what)


def describe(door: Door, known: Known, protocol: int) -> Sequence[ReportLine]:
    """Whether a shard accepts us, and which run it serves. Raises its Refusal."""
    try:
        answer = join_answer(door, known, protocol)
    except NoShard as error:
        return [failure("NOT_A_SHARD", f"{door.address} does not speak our protocol ({error})")]
    except Silence:
        return [failure("NO_ANSWER", f"{door.address} accepts connections, but answers no call within {ASK_S:g} s")]
    except NotSeeded:
        known.answers[door.address] = None
        return [ok(f"a shard of run {door.run_id} that waits for its first learner; protocol {protocol}")]
    known.answers[door.address] = answer
    params = sum(tensor.num_elements for tensor in answer.tensors if tensor.traits.is_of_model)
    model = f"{units.count(params)} parameters" if params else "no model yet"
    return [
        ok(
            f"shard {answer.shard_index} of {answer.num_shards} of run {door.run_id}: {model}, "
            f"{answer.pulse.learners_alive} learners, protocol {protocol}"
        )
    ]


def complete(known: Known) -> ReportLine:
    """Whether all shards of the run were named."""
    answers = [answer for answer in known.answers.values() if answer is not None]
    if not answers:
        return ok("the number of shards is known once a learner has joined")
    count = max(answer.num_shards for answer in answers)
    missing = sorted(set(range(count)) - {answer.shard_index for answer in answers})
    waiting = len(known.answers) - len(answers)  # their refusal does not say which of the missing ones they are
    if len(missing) > waiting:
        names = ", ".join(map(str, missing)) + f" ({waiting} of these did answer)" * bool(waiting)
        return failure("SHARDS_MISSING", f"the run has {count} shards; not named, or not reached: {names}")
    return ok(f"all {count} shards of the run were reached")


def clock_of(door: Door, known: Known) -> ReportLine:
    """The finding for a shard's clock."""
    if (told := known.told.get(door.address)) is None:
        return warning("CLOCK_UNKNOWN", f"{door.address} does not say what time it is")
    return clock(door.address, told.skew_s + known.round_trip_s.get(door.address, 0.0) / 2)


def version(door: Door, known: Known, ours: str) -> Sequence[ReportLine]:
    """Whether the shard runs our version. Empty if it did not report its own."""
    told = known.told.get(door.address)
    return [] if told is None else [package(door.address, told.package, ours)]


def clock(address: str, skew_s: float) -> ReportLine:
    """The finding for a shard's clock that is `skew_s` seconds ahead of ours."""
    what = (
        f"the clock of {address} is {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        if abs(skew_s) >= 1
        else f"the clocks of {address} and this machine agree within a second"
    )
    return warning("CLOCK_SKEWED", what, clock_skew_s=skew_s) if abs(skew_s) > SKEW_S else ok(what, clock_skew_s=skew_s)


def package(address: str, theirs: str, ours: str) -> ReportLine:
    if theirs == ours:
        return ok(f"{address} runs {theirs}, as this machine does")
    return warning("PACKAGES_DIFFER", f"{address} runs {theirs}, this machine {ours}")


class NoShard(Exception):
    """Something other than a shard answers; the message quotes gRPC."""


class Silence(Exception):
    """The connection is open, but no answer comes."""


def join_answer(door: Door, known: Known, protocol: int) -> JoinAnswer:
    """The shard's description of the run; keeps its report about itself. Raises its Refusal, NoShard, Silence."""

    async def ask() -> JoinAnswer:
        channel = rpc.channel(door.address, door.files, rpc.BULK_CHANNEL_OPTIONS)
        try:
            join = channel.unary_unary(
                f"/{rpc.SERVICE}/Join", request_serializer=protobuf.serialize,
                response_deserializer=pb.JoinResponse.FromString,
            )  # fmt: skip
            request = protobuf.to_pb(JoinRequest(protocol, "", observe=True))
            call = join(request, metadata=rpc.metadata_of(Identity(door.run_id), door.token), timeout=ASK_S)
            if (hello := rpc.hello_of(await call.initial_metadata())) is not None:
                known.told[door.address] = ToldOfItself(hello.clock - time.time(), hello.package)
            return protobuf.join_answer_from_pb(await call)
        except grpc.aio.AioRpcError as error:
            raise _cause(error) from None
        finally:
            await channel.close(0.0)

    return asyncio.run(ask())


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

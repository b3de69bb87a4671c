"""A mirror: a host that takes versions from another shard instead of from rounds. It serves Pull and Follow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from diloco_common.codec import Payload, encode_payload
from diloco_common.codec.change import decode_version, pull_encodings
from diloco_common.errors import BadChecksum, ManifestMismatch
from diloco_common.wire.calls import call_s, read_version
from diloco_common.wire.follower import Follower
from diloco_common.wire.manifest import cut
from diloco_common.wire.messages import Committed, Directive, JoinAnswer, Near, PullRequest, Pulse, Stop
from diloco_server.core.arithmetic import Published
from diloco_server.core.record import empty_record
from diloco_server.core.shard import MirroredShard
from diloco_server.shell.host import ShardHost


class Mirror:
    """Takes versions into a host. Owned by its event loop."""

    def __init__(self, host: ShardHost, follower: Follower) -> None:
        assert isinstance(host.shard, MirroredShard)
        self._host, self._shard, self._follower = host, host.shard, follower
        host.follower = follower

    async def run(self, site: str, address: str) -> None:
        """Run until cancelled. `address`: where the learners of its site reach it."""
        self._follower.request = replace(self._follower.request, site=site, address=address)
        await self._follower.run(self)

    def joined(self, answer: JoinAnswer) -> None:
        manifest = self._shard.manifest
        if manifest is None or manifest.digest != answer.manifest_digest:
            manifest = cut(answer.tensors, answer.num_fragments, answer.num_shards)
            if manifest.digest != answer.manifest_digest:
                raise ManifestMismatch("the shard cuts its model in another way: install equal versions")
            self._follower.held.clear()
        self._shard.mirror(answer, replace(manifest, ties=answer.ties))

    def hear(self, directive: Directive) -> None:
        if isinstance(directive, Pulse) and self._shard.told is not None:
            self._shard.told = replace(self._shard.told, pulse=directive)
        if isinstance(directive, Pulse | Stop):
            self._host.readers.tell(directive)

    async def take(self, committed: Committed) -> None:
        """Pull an announced version: as the change since the one it has, if possible, otherwise as values."""
        host, state = self._host, self._shard.owned(committed.fragment_id)
        assert self._follower.answer is not None
        encodings = pull_encodings(state.fragment.encoding(self._follower.answer.policy.pull_encoding))
        before = state.published
        want, have = (committed.epoch, committed.version), None if before is None else state.version_id
        if have == want:
            return
        request = PullRequest(committed.fragment_id, encodings, have, want)
        size = state.fragment.num_elements
        parts = self._follower.transport.pull(self._follower.caller, request, call_s(4 * size))
        header, payload = await read_version(parts, request, size)
        assert payload is not None, "it was not held"
        base = None if header.base_version is None else before
        try:
            rebuild = partial(_published, payload, encodings[-1], base, committed.near)
            published = await host.work.compute("encode", rebuild)
        except BadChecksum:
            state.published = None  # the next attempt asks for values
            raise
        record = replace(
            empty_record(committed.fragment_id), epoch=header.epoch, version=header.version,
            tokens_merged=header.tokens_merged,
        )  # fmt: skip
        self._shard.versions.mirrored(record, published)
        host.advance()


def _published(payload: Payload, encoding: str, before: Published | None, near: Near | None) -> Published:
    """Rebuild the version in the exact bytes that the shard sends. Raises BadChecksum, and as `decode_version`."""
    base = None if before is None else decode_version(before.values, None)[0]
    anchor, _ = decode_version(payload, base)
    published = Published(encode_payload(anchor, encoding), None if before is None else payload)
    if near is None:
        return published
    named = published.named()
    assert named.sha256 is not None
    if named.sha256[0] != near.values_sha256:
        raise BadChecksum("what came is not what was announced")
    return named

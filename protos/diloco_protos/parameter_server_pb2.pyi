from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "mean_merge", "companion", "buffer", "dtype", "prefix")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    MEAN_MERGE_FIELD_NUMBER: _ClassVar[int]
    COMPANION_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    mean_merge: bool
    companion: bool
    buffer: str
    dtype: str
    prefix: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., mean_merge: bool = ..., companion: bool = ..., buffer: _Optional[str] = ..., dtype: _Optional[str] = ..., prefix: _Optional[int] = ...) -> None: ...

class FrozenTensor(_message.Message):
    __slots__ = ("name", "form", "crc32c", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    form: str
    crc32c: int
    values: bytes
    def __init__(self, name: _Optional[str] = ..., form: _Optional[str] = ..., crc32c: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Tie(_message.Message):
    __slots__ = ("name", "of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    of: str
    def __init__(self, name: _Optional[str] = ..., of: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "process_id", "tensors", "decodes", "observe", "held", "frozen", "ties", "index", "age_s", "tokens_seen", "site")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SEEN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    process_id: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    decodes: _containers.RepeatedScalarFieldContainer[str]
    observe: bool
    held: _containers.RepeatedCompositeFieldContainer[Held]
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenTensor]
    ties: _containers.RepeatedCompositeFieldContainer[Tie]
    index: int
    age_s: float
    tokens_seen: int
    site: str
    def __init__(self, protocol: _Optional[int] = ..., process_id: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., decodes: _Optional[_Iterable[str]] = ..., observe: bool = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., frozen: _Optional[_Iterable[_Union[FrozenTensor, _Mapping]]] = ..., ties: _Optional[_Iterable[_Union[Tie, _Mapping]]] = ..., index: _Optional[int] = ..., age_s: _Optional[float] = ..., tokens_seen: _Optional[int] = ..., site: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("fragment_id", "epoch", "version")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    epoch: int
    version: int
    def __init__(self, fragment_id: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("generation", "epoch", "heartbeat_s", "shard_index", "num_shards", "num_fragments", "manifest_digest", "policy", "fragments", "pulse", "tensors", "ties", "index", "rules", "frozen", "began_with_nothing")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    BEGAN_WITH_NOTHING_FIELD_NUMBER: _ClassVar[int]
    generation: int
    epoch: int
    heartbeat_s: float
    shard_index: int
    num_shards: int
    num_fragments: int
    manifest_digest: str
    policy: LearnerPolicy
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentStatus]
    pulse: Pulse
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    ties: _containers.RepeatedCompositeFieldContainer[Tie]
    index: int
    rules: str
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenTensor]
    began_with_nothing: bool
    def __init__(self, generation: _Optional[int] = ..., epoch: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., shard_index: _Optional[int] = ..., num_shards: _Optional[int] = ..., num_fragments: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., policy: _Optional[_Union[LearnerPolicy, _Mapping]] = ..., fragments: _Optional[_Iterable[_Union[FragmentStatus, _Mapping]]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., ties: _Optional[_Iterable[_Union[Tie, _Mapping]]] = ..., index: _Optional[int] = ..., rules: _Optional[str] = ..., frozen: _Optional[_Iterable[_Union[FrozenTensor, _Mapping]]] = ..., began_with_nothing: bool = ...) -> None: ...

class LearnerPolicy(_message.Message):
    __slots__ = ("sync_every", "push_encoding", "pull_encoding")
    SYNC_EVERY_FIELD_NUMBER: _ClassVar[int]
    PUSH_ENCODING_FIELD_NUMBER: _ClassVar[int]
    PULL_ENCODING_FIELD_NUMBER: _ClassVar[int]
    sync_every: int
    push_encoding: str
    pull_encoding: str
    def __init__(self, sync_every: _Optional[int] = ..., push_encoding: _Optional[str] = ..., pull_encoding: _Optional[str] = ...) -> None: ...

class FragmentStatus(_message.Message):
    __slots__ = ("fragment_id", "seeded", "version", "merged_version", "epoch", "forgotten_version")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEEDED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MERGED_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    seeded: bool
    version: int
    merged_version: int
    epoch: int
    forgotten_version: int
    def __init__(self, fragment_id: _Optional[int] = ..., seeded: bool = ..., version: _Optional[int] = ..., merged_version: _Optional[int] = ..., epoch: _Optional[int] = ..., forgotten_version: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("inner_step", "tokens", "loss", "step_time_s", "away", "counts_samples", "leaving", "inner", "pushes_fail_why", "pushes_fail_s")
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    COUNTS_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FAIL_WHY_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FAIL_S_FIELD_NUMBER: _ClassVar[int]
    inner_step: int
    tokens: int
    loss: float
    step_time_s: float
    away: _containers.RepeatedCompositeFieldContainer[ShardAway]
    counts_samples: bool
    leaving: Leaving
    inner: str
    pushes_fail_why: str
    pushes_fail_s: float
    def __init__(self, inner_step: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., step_time_s: _Optional[float] = ..., away: _Optional[_Iterable[_Union[ShardAway, _Mapping]]] = ..., counts_samples: bool = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., inner: _Optional[str] = ..., pushes_fail_why: _Optional[str] = ..., pushes_fail_s: _Optional[float] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("fragment_ids",)
    FRAGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    fragment_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fragment_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardAway(_message.Message):
    __slots__ = ("address", "index", "for_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    index: int
    for_s: float
    def __init__(self, address: _Optional[str] = ..., index: _Optional[int] = ..., for_s: _Optional[float] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("collect", "committed", "pulse", "drain", "stop", "evicted")
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    collect: Collect
    committed: Committed
    pulse: Pulse
    drain: Drain
    stop: Stop
    evicted: Evicted
    def __init__(self, collect: _Optional[_Union[Collect, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., evicted: _Optional[_Union[Evicted, _Mapping]] = ...) -> None: ...

class Collect(_message.Message):
    __slots__ = ("fragment_id", "round", "epoch")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    round: int
    epoch: int
    def __init__(self, fragment_id: _Optional[int] = ..., round: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("fragment_id", "version", "epoch", "near")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    version: int
    epoch: int
    near: Near
    def __init__(self, fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., near: _Optional[_Union[Near, _Mapping]] = ...) -> None: ...

class Near(_message.Message):
    __slots__ = ("address", "values_sha256", "change_sha256", "header")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VALUES_SHA256_FIELD_NUMBER: _ClassVar[int]
    CHANGE_SHA256_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    address: str
    values_sha256: bytes
    change_sha256: bytes
    header: PullHeader
    def __init__(self, address: _Optional[str] = ..., values_sha256: _Optional[bytes] = ..., change_sha256: _Optional[bytes] = ..., header: _Optional[_Union[PullHeader, _Mapping]] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ("tokens_merged", "tokens_budget", "learners_alive")
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_ALIVE_FIELD_NUMBER: _ClassVar[int]
    tokens_merged: int
    tokens_budget: int
    learners_alive: int
    def __init__(self, tokens_merged: _Optional[int] = ..., tokens_budget: _Optional[int] = ..., learners_alive: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Evicted(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "chunk", "crc32c", "padding")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    chunk: bytes
    crc32c: int
    padding: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("fragment_id", "round", "epoch", "base_version", "tokens", "steps", "payload", "manifest_digest", "tokens_merged", "not_finite", "part", "num_parts", "ranges")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    round: int
    epoch: int
    base_version: int
    tokens: int
    steps: int
    payload: Payload
    manifest_digest: str
    tokens_merged: int
    not_finite: bool
    part: int
    num_parts: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, fragment_id: _Optional[int] = ..., round: _Optional[int] = ..., epoch: _Optional[int] = ..., base_version: _Optional[int] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., manifest_digest: _Optional[str] = ..., tokens_merged: _Optional[int] = ..., not_finite: bool = ..., part: _Optional[int] = ..., num_parts: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("encoding", "num_elements", "chunk_elements", "num_bytes", "chunks_crc32c")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUM_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_CRC32C_FIELD_NUMBER: _ClassVar[int]
    encoding: str
    num_elements: int
    chunk_elements: int
    num_bytes: int
    chunks_crc32c: int
    def __init__(self, encoding: _Optional[str] = ..., num_elements: _Optional[int] = ..., chunk_elements: _Optional[int] = ..., num_bytes: _Optional[int] = ..., chunks_crc32c: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("outcome", "code", "message")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[PushResponse.Outcome]
        ACCEPTED: _ClassVar[PushResponse.Outcome]
        DUPLICATE: _ClassVar[PushResponse.Outcome]
        LATE: _ClassVar[PushResponse.Outcome]
        REJECTED: _ClassVar[PushResponse.Outcome]
    OUTCOME_UNSPECIFIED: PushResponse.Outcome
    ACCEPTED: PushResponse.Outcome
    DUPLICATE: PushResponse.Outcome
    LATE: PushResponse.Outcome
    REJECTED: PushResponse.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    outcome: PushResponse.Outcome
    code: str
    message: str
    def __init__(self, outcome: _Optional[_Union[PushResponse.Outcome, str]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("fragment_id", "encodings", "have_version", "epoch", "want_version", "want_epoch", "ranges")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    HAVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WANT_VERSION_FIELD_NUMBER: _ClassVar[int]
    WANT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    encodings: _containers.RepeatedScalarFieldContainer[str]
    have_version: int
    epoch: int
    want_version: int
    want_epoch: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, fragment_id: _Optional[int] = ..., encodings: _Optional[_Iterable[str]] = ..., have_version: _Optional[int] = ..., epoch: _Optional[int] = ..., want_version: _Optional[int] = ..., want_epoch: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("header", "chunk", "crc32c", "padding")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    chunk: bytes
    crc32c: int
    padding: bytes
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., crc32c: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("fragment_id", "version", "epoch", "payload", "merged_version", "tokens_merged", "base_version", "forgotten_version", "ranges")
    FRAGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MERGED_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    fragment_id: int
    version: int
    epoch: int
    payload: Payload
    merged_version: int
    tokens_merged: int
    base_version: int
    forgotten_version: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, fragment_id: _Optional[int] = ..., version: _Optional[int] = ..., epoch: _Optional[int] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., merged_version: _Optional[int] = ..., tokens_merged: _Optional[int] = ..., base_version: _Optional[int] = ..., forgotten_version: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("role", "site", "address", "epoch", "tokens_merged")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    role: str
    site: str
    address: str
    epoch: int
    tokens_merged: int
    def __init__(self, role: _Optional[str] = ..., site: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., tokens_merged: _Optional[int] = ...) -> None: ...

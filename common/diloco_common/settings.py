"""All settings of a run: one typed, frozen tree, checked once when it is loaded.

`settings_loader.py` builds the tree from a TOML file, the environment and `--set`. Other functions take only the few
values they need. The defaults of `sync` and `outer` come from the runs in docs/quality.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSettings(Section):
    id: str = Field(default="local", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run; learners and shards of different runs refuse each other."""
    tokens: int = Field(default=0, ge=0, le=10**18)
    """Budget: the run ends when this many tokens are merged. 0: it does not end. A token is whatever the learners
    count; with `learner.step(samples=...)` it is a sample."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the initial weights and of every learner's data order."""
    model: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """Digest of the model that shards require. Empty: the first learner that joins a new shard decides the model.
    `diloco-worker digest` prints the digest of the built-in model, `diloco_worker.digest_of(model)` returns that of
    yours, and a worker logs its model's digest when it starts. Averaged momentum counts as part of the model."""
    site: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """The site of this process. A worker takes versions from mirrors of its site, if it has any (docs/mirrors.md)."""
    history: Path | None = None
    """Folder in which every process records its history, as JSON lines. None: no process records anything."""


Extension = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:\w+$")]
"""A third-party rule: `mypkg.mymod:thing`, or `plugin:NAME`, an installed entry point (docs/lab.md)."""
Plugin = Annotated[str, Field(pattern=r"^plugin:\w+$")]


EVERY_LEAST, EVERY_MOST = 6, 500
"""Bounds of H with "auto": the range in which quality was measured, and somewhat beyond it."""
OVERLAP_STEPS = 2
"""tau: a round should be over within this many inner steps."""
PATIENCE = 0.1
"""A round waits for learners that are expected later than the usual one by at most this share of the H steps, or by tau
if that is more, plus the variation of their steps. No learner stops meanwhile; only the next version comes later. A
push that is late by at most this share costs no quality (docs/quality.md)."""


class SyncSettings(Section):
    """When fragments are synchronized, and how contributions become a version. The shards hold these settings."""

    fragments: int = Field(default=24, ge=1, le=4096)
    """P: the number of fragments. Each is synchronized on its own."""
    sync_every: Annotated[int, Field(ge=1, le=2**31)] | Literal["auto"] = 12
    """H: inner steps between two rounds of a fragment. "auto": each shard measures its links, its learners' steps and
    its own merging, and chooses the smallest H that these can sustain with room to spare (docs/wan.md)."""
    quorum: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """K: how many contributions a round needs before it may close; "all" waits for every live learner."""
    grace: Annotated[float, Field(ge=0)] | Literal["adaptive"] = "adaptive"
    """Seconds that a round stays open after its quorum. "adaptive": until every learner that is expected within a tenth
    of the H steps has answered."""
    staleness_max: int = Field(default=8, ge=0)
    """A contribution is refused if its base version is more than this many versions old."""
    merge: Literal["auto", "mean", "rda", "agreement"] | Extension = "auto"
    """"auto": "agreement" if learners train with Adam or a similar optimizer, else "mean"; on each shard, the first
    learner that reports its optimizer decides. "mean": the weighted mean. "agreement": a mean that is shorter where
    learners agree. "rda": radial-directional averaging. Or a third-party rule: `mypkg.mymod:rule`, or `plugin:NAME`, an
    entry point of diloco.merge (examples/centered_clip.py)."""
    companions_every: int = Field(default=1, ge=1, le=1000)
    """Averaged momentum (`join(companions=)`, `train.average_momentum`) and buffers, such as the statistics of
    BatchNorm, are synchronized this many times less often than parameters."""
    push: Literal["float32", "bfloat16", "int8", "int4"] | Plugin = "int4"
    """Encoding of contributions. Its error is added to the next contribution. `plugin:NAME` is an entry point of
    diloco.codec (examples/e3m0.py)."""
    pull: Literal["float32", "bfloat16", "int8", "int4"] = "int8"
    """Encoding of versions. All but float32 and bfloat16 send the change since the previous version."""

    @property
    def first_every(self) -> int:
        """H as it was given; "auto" begins with the default."""
        every = self.sync_every if self.sync_every != "auto" else type(self).model_fields["sync_every"].default
        return int(every)


class OuterSettings(Section):
    """The outer optimizer. Each fragment has its own, in float32."""

    optimizer: Literal["nesterov", "sgd", "adam"] | Extension = "nesterov"
    """A built-in one, `mypkg.mymod:Rule`, or `plugin:NAME`, an entry point of diloco.outer (examples/heloco.py)."""
    lr: float = Field(default=0.7, gt=0)
    """eta: the learning rate of the outer step."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    """mu, which adam does not use. "auto": l / (l + 2) if a round merges 2^l learners, so 0.33, 0.5, 0.6 and 0.67 for
    2, 4, 8 and 16 learners; with the merge rule "agreement", l / (l + 1). At most 0.7 (docs/quality.md)."""
    average: float = Field(default=0.0, ge=0, le=0.999)
    """Shards keep a moving average of the versions (docs/checkpoints.md). This is the share of the average that stays
    when a version is added, such as 0.97. You may change it at any restart. 0: no average."""


class GuardSettings(Section):
    """How much one contribution may move the model."""

    trust: Literal["members", "strangers"] = "members"
    """"members": learners may be slow, away, diverged or on broken hardware, but do not cheat. The longest contribution
    of a round counts for at most twice the second longest, and shards believe what learners claim. "strangers":
    learners may cheat. No contribution then counts as longer than the median one, its weight and tokens count at most
    as much as the median's, and a round needs more than half of the learners that answer."""


class LeaseSettings(Section):
    lease_s: float = Field(default=6.0, gt=0)
    """Seconds of silence after which a shard evicts a learner. A learner that sends heartbeats, but has finished no
    inner step for five times as long, is shown as stalled."""
    heartbeat_s: float = Field(default=1.0, ge=0.01, le=3600)
    """Seconds between two messages, in both directions, if there is nothing else to send."""

    @model_validator(mode="after")
    def _lease_outlasts_heartbeats(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g} s) must be at least two heartbeats (2 x {self.heartbeat_s:g} s), "
                "or one lost message evicts a learner"
            )
        return self


class ShardSettings(Section):
    """One server process."""

    index: int = Field(default=0, ge=0)
    count: int = Field(default=1, ge=1)
    """Number of shards in the run. This one is number `index`, counted from 0."""
    listen: str = "127.0.0.1:0"
    """Address of gRPC. Port 0 picks a free one."""
    mirror_of: str = ""
    """Address of a shard or a mirror: this process mirrors it, and accepts no contributions (docs/mirrors.md)."""
    standby_of: str = ""
    """Address of a shard: until `diloco promote`, this process keeps that shard's version files in `data_dir`."""
    known_as: str = ""
    """For a mirror: the host:port that learners of its site connect to. Empty: the address on which it listens."""
    http: str = "127.0.0.1:0"
    """Address of /metrics, /healthz, /readyz and /status."""
    max_pushes: int = Field(default=64, ge=1)
    """How many pushes may be open at once; one learner may have 4 of them. The shard answers others with BUSY."""
    max_learners: int = Field(default=1024, ge=1, le=100_000)
    """How many leases learners may hold at once. The shard answers others with BUSY. Learners that call from one
    address without a certificate may hold half of them, or 512 if that is more."""
    data_dir: Path | None = None
    """Folder for the versions of this shard only: each version is on disk before the shard announces it. None: versions
    stay in memory, and after a restart the shard starts over."""

    @property
    def role(self) -> Literal["shard", "mirror", "standby"]:
        return "mirror" if self.mirror_of else "standby" if self.standby_of else "shard"

    @model_validator(mode="after")
    def _index_within_count(self) -> Self:
        if self.mirror_of and self.standby_of:
            raise ValueError("mirror_of and standby_of exclude each other: start two processes")
        if self.standby_of and self.data_dir is None:
            raise ValueError("standby_of keeps version files: give it data_dir")
        if self.index >= self.count:
            raise ValueError(f"index {self.index} does not exist among {self.count} shards (counted from 0)")
        return self


class CheckpointSettings(Section):
    """The regular checkpoints of each shard, in `checkpoints` of its data folder (docs/checkpoints.md)."""

    every: int = Field(default=0, ge=0)
    """Versions between two checkpoints. 0: no regular checkpoints; `diloco checkpoint` takes one at any time."""
    keep: int = Field(default=3, ge=2)
    """Number of newest checkpoints to keep. Each takes the disk space of one version of every fragment. At least two:
    otherwise a shard that is ahead of the others would remove its part of a checkpoint that they have just finished."""


class WorkerSettings(Section):
    """One worker process."""

    shards: tuple[str, ...] = ()
    """Addresses of all shards, host:port, in any order. `@FILE` names the address file of a shard that may move."""
    learner_id: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Unique in the run. Empty: the id in certificate or checkpoint, else host name, process id and a random part."""
    http: str = "127.0.0.1:0"
    """Address of /metrics, /healthz, /readyz and /status."""
    hung_s: float = Field(default=1800.0, ge=0)
    """Seconds without the end of an inner step after which a training worker counts as hung: /healthz answers 503, and
    `diloco up`, systemd and Kubernetes restart it. Allow for the longest compilation or evaluation. 0: never."""
    device: str = "auto"
    """"auto" takes an accelerator if there is one. Or torch's name of a device: "cpu", "cuda", "cuda:1", "xpu"."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0: torch decides."""
    folder: Path | None = None
    """Folder for the worker's own checkpoint (optimizer, weights, data position, step). None: no checkpoint."""
    checkpoint_every_s: float = Field(default=30.0, gt=0)
    """Seconds between two of the worker's own checkpoints."""
    track: str = Field(default="", pattern=r"^((tensorboard|wandb|csv):.+)?$")
    """Tracker for the curves of the built-in training: `tensorboard:DIR`, `wandb:PROJECT` (offline unless WANDB_MODE
    says otherwise) or `csv:FILE`. Empty: none."""
    step_min_s: float = Field(default=0.0, ge=0)
    """Minimum seconds of an inner step: the worker sleeps for the rest. It makes a straggler for experiments."""


class ModelSettings(Section):
    """The built-in GPT over bytes."""

    layers: int = Field(default=3, ge=1)
    heads: int = Field(default=3, ge=1)
    width: int = Field(default=96, ge=8)
    context: int = Field(default=128, ge=8)
    """Bytes of context."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(f"width ({self.width}) must be a multiple of 2 x heads ({2 * self.heads})")
        return self


class TrainSettings(Section):
    """The inner optimizer and its schedule in the built-in training."""

    batch: int = Field(default=8, ge=1)
    """Sequences per inner step and learner."""
    optimizer: Literal["muon", "adamw"] | Extension = "muon"
    """"muon": Muon for the matrices of the layers, AdamW for embedding and output head. "adamw": AdamW for all. Or a
    function of the model and these settings: `mypkg.mymod:make`, or `plugin:NAME`, an entry point of diloco.inner."""
    lr: float = Field(default=4e-3, gt=0)
    """Highest rate of AdamW. If it is the only optimizer, 2e-3 was best (docs/quality.md)."""
    muon_lr: float = Field(default=5e-3, gt=0)
    """Highest rate of Muon. An update has the root mean square of an AdamW update at this rate."""
    warmup: float = Field(default=0.05, ge=0, le=1)
    """Share of the token budget during which rates rise; then they fall linearly, to zero at the end of the budget. If
    AdamW is the only optimizer, 0.2 to 0.4 was better in short runs (docs/quality.md)."""
    average_momentum: bool = False
    """Average the momentum of Muon and AdamW among the workers, like the model (docs/decisions.md). Must be equal in
    all workers of a run. It adds 1 / `sync.companions_every` to the bytes on the wire."""


class DataSettings(Section):
    source: str = "stdlib"
    """"stdlib" (the source of the running Python's standard library), or a file or folder of text. A twentieth of the
    files is held out for evaluation, chosen by a hash of their names."""


class SecuritySettings(Section):
    """Which callers a shard admits, and how they prove who they are (docs/deploy.md)."""

    tls: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem, as `diloco certs issue` makes it. Calls are then encrypted, and both
    sides prove who they are. A worker behind a proxy that ends TLS needs only ca.pem."""
    revoked: Path | None = None
    """The deny-list that `diloco certs revoke` writes. Shards read it again when it changes. None: revoked.json in the
    folder `tls`, if there is one."""
    token_file: Path | None = None
    """File with the bearer token of the run: workers send it, and a shard with this setting requires it."""
    insecure: bool = False
    """Allow a shard to serve in plaintext on a non-loopback address, and to serve HTTP there without any protection."""


class ClusterSettings(Section):
    """The cluster of `diloco up`, on this machine or on Ray."""

    shards: int = Field(default=2, ge=1, le=64)
    workers: int = Field(default=3, ge=1, le=256)
    folder: Path = Path("runs/local")
    """Folder for versions, logs, addresses, the report and the exported model."""
    worker_gpus: float = Field(default=0.0, ge=0)
    """GPUs that each worker requests from Ray; a worker sees only the GPUs that it got."""
    page: str = "127.0.0.1:7171"
    """host:port of the run's live page. Empty: no page. If the port is in use, `diloco up` takes a free one."""


class Settings(Section):
    run: RunSettings = RunSettings()
    sync: SyncSettings = SyncSettings()
    outer: OuterSettings = OuterSettings()
    guard: GuardSettings = GuardSettings()
    lease: LeaseSettings = LeaseSettings()
    shard: ShardSettings = ShardSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    worker: WorkerSettings = WorkerSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    data: DataSettings = DataSettings()
    security: SecuritySettings = SecuritySettings()
    cluster: ClusterSettings = ClusterSettings()

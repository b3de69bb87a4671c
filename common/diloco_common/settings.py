"""All settings of a run: one typed, frozen tree, checked once when it is loaded.

`settings_loader.py` builds the tree from a TOML file, the environment and `--set`. All other functions take only the
few values they need. The runs in docs/quality.md decided the defaults of `sync` and `outer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class RunSettings(Section):
    id: str = Field(default="local", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run; learners and shards of different runs refuse each other."""
    tokens: int = Field(default=0, ge=0, le=10**18)
    """Budget: the run ends when this many tokens are merged. 0: no end. A token is whatever the learners count: with
    `learner.step(samples=...)` it is a sample."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the initial weights and of every learner's data order."""
    model: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    """Digest of the model that shards insist on. Empty: the first learner that joins a new shard brings the model.
    `diloco-worker digest` prints that of the built-in model, `diloco_worker.digest_of(model)` gives that of yours, and
    a worker says that of its model when it starts. Momentum that is averaged counts as part of the model."""
    history: Path | None = None
    """Folder in which every process records its history, as JSON lines; none: nothing is recorded."""


Extension = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:\w+$")]
"""A rule of others: `mypkg.mymod:thing`, or `plugin:NAME`, an installed entry point (docs/lab.md)."""
Plugin = Annotated[str, Field(pattern=r"^plugin:\w+$")]


FIRST_EVERY, EVERY_LEAST, EVERY_MOST = 12, 6, 500
"""H that "auto" begins with, and the least and the most that it chooses: what quality was measured for, and more."""
BLEND_ALPHA = 0.5
"""alpha of "blend", as published: theta <- alpha * theta + (1 - alpha) * new."""


class SyncSettings(Section):
    """When fragments are synchronised, and how contributions become a version. The shards hold these settings."""

    fragments: int = Field(default=24, ge=1, le=4096)
    """P: the number of fragments. Each one is synchronised on its own."""
    sync_every: Annotated[int, Field(ge=1, le=2**31)] | Literal["auto"] = 12
    """H: inner steps between two rounds of a fragment. "auto": each shard chooses the smallest H that its links, the
    steps of its learners and its own merging can sustain with room to spare. It measures them (docs/wan.md)."""
    quorum: Annotated[int, Field(ge=1)] | Literal["all"] = 1
    """K: contributions that let a round close; "all" waits for every live learner."""
    grace: Annotated[float, Field(ge=0)] | Literal["adaptive"] = "adaptive"
    """How long a round stays open after its quorum, in seconds. "adaptive": where learners carry, for everybody who is
    expected with `patience`; else as long as the overlap leaves slack."""
    patience: float = Field(default=0.1, gt=0, le=1)
    """With carry: a round waits for whoever is expected at most this share of the H steps later than the usual learner,
    or `overlap_steps` if that is more, and what its steps vary by. No learner stands still meanwhile; the next version
    comes later by so much."""
    overlap_steps: int = Field(default=2, ge=0)
    """tau: a round should be over within this many inner steps."""
    staleness_max: int = Field(default=8, ge=0)
    """A contribution is refused if its base version is more than this many versions old."""
    merge: Literal["auto", "mean", "rda", "agreement"] | Extension = "auto"
    """"auto": "agreement" where learners train with Adam or its kin, else "mean"; the first learner that says what it
    trains with decides, on each shard by itself. "mean": weighted. "agreement": a mean that is shorter where learners
    agree. "rda": radial-directional averaging. Or one of others: `mypkg.mymod:rule`, or `plugin:NAME`, an entry point
    of diloco.merge (examples/centered_clip.py)."""
    companions_every: int = Field(default=1, ge=1, le=1000)
    """What goes along with the parameters is due so many times as rarely as they are: inner momentum that learners
    average (`join(companions=)`, `train.average_momentum`), and buffers, such as the statistics of BatchNorm."""
    on_commit: Literal["carry", "overwrite", "blend"] = "carry"
    """What a learner does with its own progress when a version arrives."""
    push: Literal["float32", "bfloat16", "int8", "int4"] | Plugin = "int4"
    """Encoding of contributions; `plugin:NAME` is an entry point of diloco.codec (examples/e3m0.py)."""
    pull: Literal["float32", "bfloat16", "int8", "int4"] = "int8"
    """Encoding of versions. All but float32 and bfloat16 send the change since the version before."""
    error_feedback: bool = True
    """Add the loss of the push encoding to the next contribution."""

    @property
    def first_every(self) -> int:
        """H as it is given, or what "auto" begins with, before anything is measured."""
        return FIRST_EVERY if self.sync_every == "auto" else self.sync_every


class OuterSettings(Section):
    """The outer optimizer, one per fragment, in float32."""

    optimizer: Literal["nesterov", "sgd", "adam"] | Extension = "nesterov"
    """One of ours, `mypkg.mymod:Rule`, or `plugin:NAME`, an entry point of diloco.outer (examples/heloco.py)."""
    lr: float = Field(default=0.7, gt=0)
    """eta."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    """mu of all but adam. "auto": l / (l + 2), where a round merges 2^l learners, so 0.33, 0.5, 0.6 and 0.67 of 2, 4, 8
    and 16; where the merge rule is "agreement", l / (l + 1). At most 0.7 (docs/quality.md)."""
    average: float = Field(default=0.0, ge=0, le=0.999)
    """Shards keep an average of the versions (docs/checkpoints.md): what it keeps of itself with each version, such as
    0.97. It may change at any restart. 0: they keep none."""


class GuardSettings(Section):
    """How much one contribution may move the model."""

    trust: Literal["members", "strangers"] = "members"
    """"members": learners may be slow, away, diverged or on broken hardware, but do not cheat. The longest contribution
    of a round counts as long as the second longest, and claims are believed. "strangers": they may cheat. Then it
    counts as long as the median, no weight and no tokens count for more than the median's, and a round needs more than
    half of the learners that answer."""


class LeaseSettings(Section):
    lease_s: float = Field(default=6.0, gt=0)
    """Seconds of silence after which a learner is evicted."""
    heartbeat_s: float = Field(default=1.0, ge=0.01, le=3600)
    """Seconds between two messages, in both directions, if there is nothing else to send."""
    stalled_s: float = Field(default=30.0, gt=0)
    """Seconds without an inner step after which a learner is shown as stalled, although its heartbeats come."""
    progress_timeout_s: float = Field(default=0.0, ge=0)
    """Seconds without an inner step after which such a learner is evicted. 0: never."""

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
    """Shards of the run. This one is number `index`, counted from 0."""
    listen: str = "127.0.0.1:0"
    """Address of gRPC. Port 0 picks a free one."""
    mirror_of: str = ""
    """Address of a shard, or of a mirror: this process is a mirror of it, and takes no work (docs/mirrors.md)."""
    standby_of: str = ""
    """Address of a shard: this process keeps its version files in `data_dir`, until `diloco promote`."""
    site: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Of a mirror: where it is. Learners with this `worker.site` take versions from it. Empty: none is sent to it."""
    known_as: str = ""
    """Of a mirror: host:port as the learners of its site dial it. Empty: as it listens."""
    http: str = "127.0.0.1:0"
    """Address of /metrics, /healthz, /readyz and /status."""
    max_pushes: int = Field(default=64, ge=1)
    """Pushes that may be open at once, of all learners; one learner may have 4. Further ones are answered BUSY."""
    max_learners: int = Field(default=1024, ge=1, le=100_000)
    """Leases that may be held at once. Further ones are answered BUSY. Learners that call from one address and show no
    certificate may hold half of them, or 512 if that is more."""
    bytes_in_max: int = Field(default=4 << 30, ge=1 << 20)
    """Payload bytes that open pushes may have announced, all together. Further pushes are answered BUSY. Held beside
    it: what rounds have accepted, at most one contribution per learner and fragment."""
    data_dir: Path | None = None
    """Folder for the versions of this shard alone; none: versions stay in memory, and a restart begins anew."""
    interval_s: float = Field(default=0.0, ge=0)
    """0: a version is on disk before it is announced. Else versions are announced at once, and a fragment is written
    every so many seconds, for slow disks. If a crash loses versions, the shard reports it once it meets a learner that
    holds them."""

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
    """Versions between two checkpoints. 0: only `diloco checkpoint` takes any."""
    keep: int = Field(default=3, ge=2)
    """Checkpoints that are kept, the newest ones. Each takes the disk space of one version of every fragment. At least
    two: otherwise a shard that is ahead would remove its part of a checkpoint that the others have just finished."""


class WorkerSettings(Section):
    """One worker process."""

    shards: tuple[str, ...] = ()
    """Addresses of all shards, host:port, in any order. `@FILE` is the address file of a shard that may move."""
    learner_id: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Unique in the run; empty: that of the checkpoint, or made from host name, process id and something drawn."""
    site: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Where it is: it takes versions from the shards' mirrors of this site, where there are any (docs/mirrors.md)."""
    http: str = "127.0.0.1:0"
    """Address of /metrics, /healthz, /readyz and /status."""
    hung_s: float = Field(default=1800.0, ge=0)
    """Seconds without the end of an inner step after which a worker that trains counts as hung: /healthz answers 503,
    and `diloco up`, systemd and Kubernetes start it again. Longer than any compilation or evaluation; 0: never."""
    device: str = "auto"
    """"auto": an accelerator if there is one. Else as torch names it: "cpu", "cuda", "cuda:1", "xpu"."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of torch; 0: torch decides."""
    folder: Path | None = None
    """Folder for the worker's own checkpoint (optimizer, weights, data position, step); none: nothing is kept."""
    checkpoint_every_s: float = Field(default=30.0, gt=0)
    """Seconds between two of the worker's own checkpoints."""
    track: str = Field(default="", pattern=r"^((tensorboard|wandb|csv):.+)?$")
    """Where the curves of the built-in training go: `tensorboard:DIR`, `wandb:PROJECT` (offline unless WANDB_MODE says
    otherwise) or `csv:FILE`. Empty: nowhere."""
    step_min_s: float = Field(default=0.0, ge=0)
    """An inner step takes at least this long: it sleeps for the rest. Makes a straggler for experiments."""


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
    """The inner optimizer and its schedule, of the built-in training."""

    batch: int = Field(default=8, ge=1)
    """Sequences per inner step and learner."""
    optimizer: Literal["muon", "adamw"] | Extension = "muon"
    """"muon": Muon for the matrices of the layers, AdamW for embedding and output head. "adamw": AdamW for all. Or a
    function of model and these settings: `mypkg.mymod:make`, or `plugin:NAME`, an entry point of diloco.inner."""
    lr: float = Field(default=4e-3, gt=0)
    """Of AdamW, at its highest. Where it is the only one, 2e-3 was best (docs/quality.md)."""
    muon_lr: float = Field(default=5e-3, gt=0)
    """Of Muon, at its highest. An update has the root mean square that one of AdamW has at this rate."""
    schedule: Literal["cosine", "wsd", "linear"] = "linear"
    """How rates go down after the warm-up, by global progress. "wsd" (warm-up, stable, decay) stays at the highest, and
    falls in a line over the last half of the budget."""
    lr_final: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this share of the highest rates."""
    warmup: float = Field(default=0.05, ge=0, le=1)
    """Share of the token budget over which rates rise. Where AdamW is the only one, 0.2 to 0.4 was better in short runs
    (docs/quality.md)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Of matrices, in both optimizers."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """Of AdamW."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of Muon."""
    clip: float = Field(default=1.0, gt=0)
    """Norm to which gradients are clipped."""
    average_momentum: bool = False
    """Average the first moments of Muon and AdamW among the workers, as the model is (docs/decisions.md). All workers
    of a run alike. It adds 1 / `sync.companions_every` of the bytes on the wire."""


class DataSettings(Section):
    source: str = "stdlib"
    """"stdlib" (the source of the running Python's standard library), or a file or folder of text. A twentieth of the
    files is kept for evaluation; a hash of their names selects them."""


class SecuritySettings(Section):
    """Who may call, and how that is proven (docs/deploy.md)."""

    tls: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem, as `diloco certs issue` makes it. Calls are then encrypted, and both
    sides prove who they are. For a worker behind a proxy that ends TLS, ca.pem alone will do."""
    revoked: Path | None = None
    """The deny-list that `diloco certs revoke` writes. Shards read it, again when it changes. None: revoked.json in the
    folder `tls`, if there is one."""
    token_file: Path | None = None
    """File with the bearer token that all share: workers send it, and a shard that has this setting asks for it."""
    audit: Path | None = None
    """Folder for the audit log of each shard: who joined, left, was refused or revoked. None: there is none."""
    insecure: bool = False
    """Allow a shard to serve in plaintext on a non-loopback address, and HTTP there where nothing else is set here."""


class ClusterSettings(Section):
    """The cluster of `diloco up`, on this machine or on Ray."""

    shards: int = Field(default=2, ge=1, le=64)
    workers: int = Field(default=3, ge=1, le=256)
    folder: Path = Path("runs/local")
    """Folder for versions, logs, addresses, the report and the exported model."""
    restart: bool = True
    """Start a shard or worker again when it dies unexpectedly."""
    hung_s: float = Field(default=60.0, ge=0)
    """`diloco up` kills a shard or worker that has answered nothing for so many seconds, or that says itself that it
    hangs (`worker.hung_s`); 0: never."""
    worker_gpus: float = Field(default=0.0, ge=0)
    """GPUs that each worker asks Ray for; a worker sees only those that it got."""
    page: str = "127.0.0.1:7171"
    """Where the live page of the run is served, host:port; empty: nowhere. If the port is taken, on a free one."""


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

"""`join`: makes a learner with wall clock, real randomness, threads, gRPC, files and HTTP.

Its arguments stay flat: a loop names the few that it needs, the callbacks for Hugging Face and Lightning pass them on,
and a mistyped one is refused with the nearest name (`shell/arguments.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco_common.codec import memory, native
from diloco_common.errors import CannotConnect, ConfigError, UnsupportedModel, WrongCall
from diloco_common.observe import logs
from diloco_common.observe.history import HistoryFile
from diloco_common.observe.http import HttpServer
from diloco_common.observe.http_listener import TlsDoor
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics.worker import WorkerMetrics
from diloco_common.ports import World
from diloco_common.trust.credentials import Credentials, addresses_of
from diloco_common.wire.addresses import write_address
from diloco_common.wire.calls import AGAIN_S, HURRY_S
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.manifest import model_digest
from diloco_worker.core.connection import Caller
from diloco_worker.core.copies import Masters, find_copies
from diloco_worker.core.device import in_pinned_memory, is_accelerator
from diloco_worker.core.momentum import Companions
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import Models, Patterns, SharedSet, as_module
from diloco_worker.global_model import pull_global_model
from diloco_worker.learner import Learner, make_learner
from diloco_worker.shell import frozen_tensors
from diloco_worker.shell.arguments import check_name, check_seconds, check_word
from diloco_worker.shell.boundary import Start
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.ending import WaitLog
from diloco_worker.shell.frozen_tensors import FrozenRule
from diloco_worker.shell.island import Island, IslandGroup, check_ranks, is_together
from diloco_worker.shell.network_thread import NetworkThread
from diloco_worker.shell.optimizers import Compared, several
from diloco_worker.shell.process import as_one_line, check_may_join, close_earlier, joined, say_in_one_line
from diloco_worker.shell.telemetry import LearnerTelemetry
from diloco_worker.shell.watch import ModelWatch
from diloco_worker.view import LearnerState, read_state


def join(
    shards: str | Sequence[str],
    model: Models,
    *,
    run: str = "local",
    learner_id: str = "",
    tls: str | Path | None = None,
    token: str | Path | None = None,
    shared: Patterns | None = None,
    private: Patterns = (),
    mean_merge: Collection[str] | None = None,
    companions: Optimizer | Sequence[Optimizer] | None = None,
    masters: Masters | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    after_version: Callable[[], object] | None = None,
    state: Mapping[str, Any] | None = None,
    site: str = "",
    http: str | None = None,
    address_file: str | Path | None = None,
    history: str | Path | None = None,
    wait_s: float | None = None,
    island: Island = None,
    frozen: FrozenRule = "same",
    residuals: Literal["device", "host"] = "device",
    log: Literal["stderr"] | None = "stderr",
) -> Learner:
    """Join a run. Returns once the model holds the latest version of every fragment.

    From then on SIGTERM makes the learner leave at its next step boundary (`Learner.leave`) and ends the process with
    SystemExit(143), if `join` was called in the main thread and the process had no handler for SIGTERM.

    Args:
        shards: addresses of all shards, host:port, in any order; a string separates them by commas. `@FILE` names the
            address file of a shard that may move; the file is read again when it changes.
        model: its trainable parameters are synchronized, and so are the buffers in its state_dict (the statistics of
            BatchNorm, for example). The optimizer stays local. For a list of modules, parameter names begin with "0.",
            "1.", ...; for a dict, with its keys ("actor.").
        run: id of the run, as configured on the shards.
        learner_id: unique in the run. Empty: the id in the certificate, or in `state`, or one made from host name,
            process id and a random part.
        tls: folder made by `diloco certs issue learner/ID`, read again when it changes. Calls are then encrypted and
            authenticated. None: plaintext.
        token: bearer token, if the shards require one. A Path names a file that holds it and is read again.
        shared: names or patterns (["head.*"]) of all parameters that will ever be trained, or "all". They may be frozen
            and unfrozen at any time. None: the parameters that require a gradient now. Equal in all learners.
        private: names or patterns of parameters that are trained but never sent (this learner's own adapters or head),
            and of buffers that stay local, such as a queue of samples (["*.queue*"]). They are not compared, and
            `finish` leaves them as they are. Equal in all learners.
        mean_merge: names of parameters merged by plain mean. None: embeddings and the output head.
        companions: optimizers of this model whose momentum is averaged among learners, at its own cadence
            (`sync.companions_every`). Make them before `join`, and load their saved state first. Supported: torch's
            Adam, AdamW, Muon and SGD, with float32 state. Equal in all learners. None: momentum stays local.
        masters: copies of the weights that the optimizer updates and then writes over the parameters; versions must
            reach them too. Examples: float32 masters of 16-bit parameters, `z` of schedule-free optimizers, the slow
            weights of Lookahead. Give one or several optimizers that keep the copies under a known name, or a function
            of a parameter's name (`copies.get` of a dict). None: the optimizer updates the parameters themselves, as
            torch's do.
        optimizer: all optimizers of this model, one or several. Shards choose the merge by whether they are of the Adam
            family (`sync.merge`). Refused if they train something other than what is shared (a target network that
            requires gradients, a head inside the loss). None: the learner checks this in the first steps if it sees an
            optimizer (`follow`, `ProgressLR`, callbacks), and only warns.
        after_version: function without arguments that clamps or projects the parameters, for loops that do so after
            each step. Called under `torch.no_grad()` whenever global values were written to the model, also by `finish`
            and `global_values`: means and outer steps can leave the allowed set.
        state: result of `learner.state_dict()`, saved with the checkpoint that model and optimizer were loaded from.
            The learner continues as the same one, with its counts. One shard that answers is then enough: for the
            others, training goes on from the values in the model, and the work is contributed when they are back.
        site: the place of this learner, as the run names it. It pulls versions from mirrors there, if there are any
            (docs/mirrors.md), and checks them against what the shard announced.
        http: address on which to serve /metrics, /healthz, /readyz and /status. None: serve nothing.
        address_file: file that receives the served address once it is known.
        history: folder for a record of this learner's events, as JSON lines. None: no record.
        wait_s: seconds to wait for shards that do not answer. None: wait forever, and log it every 10 s.
        island: process group or device mesh (torch.distributed.group.WORLD, for example) whose ranks train this model
            together by DDP or FSDP2, as one learner. All ranks make the same calls in the same order (docs/islands.md).
            "alone": each process started by torchrun or another launcher trains its own model as its own learner. None:
            one process; several are refused.
        frozen: "same": frozen parameters and packed weights of quantized layers must equal those of the other learners,
            bit for bit. "any": they may differ (a base in another dtype, or quantized) and are not checked.
        residuals: where the learner keeps the error of its encodings, 2 bytes per parameter (4 with some plugins): on
            the model's "device", or in pinned "host" memory, copied back for each encoding. For pinned memory, torch
            rounds the bytes of each tensor up to a power of two.
        log: "stderr": log to stderr, unless the process has handlers for our logs, and show only the message
            of our own uncaught errors. None: neither.

    Raises:
        ConfigError: an address or `state` is invalid, the shards are not of one run, or the certificate or `state` is
            of another run.
        WrongCall: an argument is invalid, or this process was forked from a learner's and would join in its place.
        UnsupportedModel: the model cannot be synchronized (FSDP1 and DeepSpeed, for example), the momentum of an
            optimizer cannot be averaged (it never can in an island), or `optimizer` trains something other than what is
            shared. The message says why and what to do; of several processes, only rank 0 gives it in full.
        CannotConnect: not all shards answered within `wait_s`.
        HandshakeFailed: TLS failed, and only a change of settings or certificates can fix it.
        Refusal: a shard refuses this learner (other model, other run, wrong token, ...).
    """
    _listen(log)
    check_seconds("wait_s", wait_s)
    check_word("frozen", frozen, ("same", "any"))
    check_word("residuals", residuals, ("device", "host"))
    if after_version is not None and not callable(after_version):
        raise WrongCall("after_version= takes a function without arguments, such as lambda: clamp(model)")
    who = _who(shards, run, learner_id, tls, token, state, site)
    module = as_module(model)
    check_ranks(module, island)
    chosen = SharedSet(module, shared, private)
    compared = Compared(None if masters is not None else chosen, optimizer)
    group = IslandGroup(island) if is_together(island) else None
    if group is not None:
        who = replace(who, name=group.agree_on(who.name, who.saved))
    replica, averaged = _replica_of(chosen, mean_merge, companions, masters, group)
    for one in several(companions):
        compared.has(one)
    world = real_world()
    process_id = f"{time.time_ns():016x}{world.random.getrandbits(32):08x}"
    caller = Caller(run, who.name, process_id, 0 if group is None else group.rank, world.clock())
    name, shows = (
        (f"{who.name}/{caller.rank}", LearnerOutputs())
        if caller.rank
        else (who.name, LearnerOutputs(http, address_file, history))
    )
    telemetry = _telemetry(caller, name, world, shows, who.credentials)
    _say_what_it_takes(replica, chosen, telemetry, residuals)
    network = NetworkThread(
        None if shows.http is None else partial(_http_server, shows.http, telemetry, who.credentials)
    )
    learner = make_learner(
        replica, who.addresses, caller, partial(GrpcTransport, credentials=who.credentials), world, network, telemetry,
        who.start, index=None if who.saved is None else who.saved.index,
        frozen=frozen_tensors.declare(chosen) if frozen == "same" else (),
        watch=None if replica.is_spread else ModelWatch(chosen, None if averaged is None else averaged.check),
        council=None if group is None else group.council(), after_version=after_version, site=who.site,
        compared=compared, pull_average=who.average if group is None else None,
    )  # fmt: skip
    joined(run, caller.learner_id, learner)
    learner.listen()
    with _closed_if_it_fails(learner, name):
        learner.start()
        shows.write_address(name, network.http_address)
        _wait_until_joined(learner, world, wait_s)
        if group is not None:
            learner.number(int(group.agree(str(learner.index))))
    return learner


@dataclass(frozen=True)
class JoiningLearner:
    """Which learner joins, where it joins, and how it proves its identity."""

    run: str
    name: str
    addresses: list[str]
    tls: Path | None
    token: str | Path | None
    credentials: Credentials
    saved: LearnerState | None
    """The state that an earlier process saved."""
    site: str

    @property
    def start(self) -> Start:
        saved = self.saved
        if saved is None:
            return Start()
        return Start(saved.inner_step, saved.tokens, saved.tokens_merged, resumed=True)

    def average(self) -> Mapping[str, Tensor]:
        """The current average of the versions, pulled from the shards."""
        return pull_global_model(
            self.addresses, run=self.run, tls=self.tls, bearer_token=self.token, average=True
        ).tensors


@dataclass(frozen=True)
class LearnerOutputs:
    """Where the learner publishes its state. In an island, only the leader logs, records and serves, for all ranks."""

    http: str | None = None
    address_file: str | Path | None = None
    history: str | Path | None = None

    def write_address(self, name: str, http: str) -> None:
        if self.address_file is not None:
            with _written(f"address_file={str(self.address_file)!r} cannot be written: {{}}"):
                write_address(Path(self.address_file), "worker", name, http=http)


def _who(
    shards: str | Sequence[str], run: str, learner_id: str, tls: str | Path | None, token: str | Path | None,
    state: Mapping[str, Any] | None, site: str,
) -> JoiningLearner:  # fmt: skip
    """Raises the errors that `join` raises for these arguments."""
    addresses = addresses_of(shards)
    check_name("run", run)
    if site:
        check_name("site", site)
    folder = None if tls is None else Path(tls)
    credentials = Credentials(folder, token)
    saved = read_state(state, run)
    wanted = learner_id or (saved.learner_id if saved is not None else "")
    name = credentials.learner_id(wanted, run)
    check_may_join(run, name)
    if not wanted:
        close_earlier(run, name)
    return JoiningLearner(run, name, addresses, folder, token, credentials, saved, site)


def digest_of(
    model: Models, mean_merge: Collection[str] | None = None,
    companions: Optimizer | Sequence[Optimizer] | None = None, *, shared: Patterns | None = None,
    private: Patterns = (),
) -> str:  # fmt: skip
    """The digest of a model, in the form of the shards' setting `run.model`; arguments as in `join`.

    Raises UnsupportedModel, and ConfigError if `companions` are not optimizers of this model.
    """
    replica, _ = _synchronised(SharedSet(model, shared, private), mean_merge, companions)
    return model_digest(replica.specs)


def real_world() -> World:
    """The world of production: real time, randomness and threads."""
    return World(time.monotonic, time.thread_time, random.SystemRandom(), _threads, memory.give_back)


def _synchronised(
    chosen: SharedSet, mean_merge: Collection[str] | None, companions: Optimizer | Sequence[Optimizer] | None
) -> tuple[Replica, Companions | None]:
    """The whole model, and the companions averaged with it. Raises UnsupportedModel and ConfigError."""
    if companions is None:
        return Replica(chosen, mean_merge), None
    averaged = Companions(companions, chosen)
    return Replica(chosen, mean_merge, averaged.by_name), averaged


def _replica_of(
    chosen: SharedSet, mean_merge: Collection[str] | None, companions: Optimizer | Sequence[Optimizer] | None,
    masters: Masters | None, group: IslandGroup | None,
) -> tuple[Replica, Companions | None]:  # fmt: skip
    if group is None:
        replica, averaged = _synchronised(chosen, mean_merge, companions)
    elif companions is not None:
        raise UnsupportedModel("companions=: an island cannot average its momentum yet; leave it local")
    else:
        replica, averaged = group.replica(chosen, mean_merge), None
    if masters is not None:
        if replica.is_spread:
            raise UnsupportedModel("masters=: copies under fully_shard get no versions yet; shard float32 parameters")
        replica.keep_copies(find_copies(masters, chosen))
    return replica, averaged


def _listen(log: Literal["stderr"] | None) -> None:
    check_word("log", log, ("stderr", None))
    if log == "stderr":
        logs.listen()
        say_in_one_line()
    else:
        logs.keep_quiet()


def _telemetry(
    caller: Caller, name: str, world: World, shows: LearnerOutputs, credentials: Credentials
) -> LearnerTelemetry:
    recorded = None
    if shows.history:
        with _written(f"history={str(shows.history)!r}: {{}}; give a folder that can be written"):
            recorded = HistoryFile(Path(shows.history), name)
    telemetry = LearnerTelemetry(caller, world.clock, WorkerMetrics(), Log(name), recorded)
    if credentials.tls() is not None:
        telemetry.metrics.certificates.follow(credentials.files)
    return telemetry


@contextmanager
def _written(words: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError with this text; the system's message replaces {} in it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(words.format(error.strerror)) from None


def _threads(count: int, name: str) -> Executor:
    """Threads that run torch on one core each: a second OpenMP team on the same cores would slow down both.

    `torch.set_num_threads` sets the calling thread and all threads started later, so the old number is set again.
    """
    executor = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
    threads = torch.get_num_threads()
    executor.submit(int).result()
    torch.set_num_threads(threads)
    return executor


def _say_what_it_takes(replica: Replica, chosen: SharedSet, telemetry: LearnerTelemetry, residuals: str) -> None:
    """Log which kernels are used and what is synchronized, and choose where residuals are kept."""
    log, is_on_cpu = telemetry.log, replica.device.type == "cpu"
    if is_on_cpu and isinstance(why := native.find(), str):
        log.warning("no native kernels: encoding takes several times as long", why=why)
    elif is_on_cpu:
        log.event("kernels", origin=native.origin())
    if residuals == "host" and is_accelerator(replica.device):
        replica.stow = in_pinned_memory
    elif residuals == "host":
        log.warning(
            'residuals="host" changes nothing: memory is pinned for an accelerator only', device=replica.device.type
        )
    telemetry.model(replica.specs, sum(p.numel() for p in chosen.frozen.values()))


def _http_server(
    address: str, telemetry: LearnerTelemetry, credentials: Credentials, connections: Connections
) -> HttpServer:
    files = credentials.tls()
    return HttpServer(
        address,
        registry=telemetry.metrics.registry,
        status=lambda: telemetry.status(connections.pulse, connections.figures()),
        ready=lambda: telemetry.readiness,
        alive=lambda: telemetry.health,
        bearer_token=credentials.token(),
        door=None if files is None or files.pair is None else TlsDoor(credentials.files),
    )


@contextmanager
def _closed_if_it_fails(learner: Learner, name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        learner.close(HURRY_S)
        raise as_one_line(f"{name} had not joined yet: {learner.telemetry.readiness[1]}") from None
    except BaseException:
        learner.close()
        raise


def _wait_until_joined(learner: Learner, world: World, wait_s: float | None) -> None:
    """Raises CannotConnect, and the errors of `Learner.begin`."""
    began = world.clock()
    wait_log = WaitLog(learner.telemetry.log, "waiting", began)
    while not learner.begin():
        missing = learner.telemetry.readiness[1]
        now = world.clock()
        if wait_s is not None and now - began > wait_s:
            raise CannotConnect(f"no run to join after {wait_s:g} s: {missing}")
        wait_log.still(missing, now)
        learner.poll(AGAIN_S)

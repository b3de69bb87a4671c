"""`join`: a learner in the real world: wall clock, real randomness and threads, gRPC, files, HTTP."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from diloco_common.codec import memory, native
from diloco_common.errors import CannotConnect, ConfigError, UnsupportedModel
from diloco_common.observe import logs
from diloco_common.observe.history import HistoryFile
from diloco_common.observe.http import HttpServer
from diloco_common.observe.http_listener import TlsDoor
from diloco_common.observe.logs import Log
from diloco_common.observe.metrics import WorkerMetrics
from diloco_common.ports import World
from diloco_common.trust.credentials import Credentials, addresses_of
from diloco_common.wire.addresses import write_address
from diloco_common.wire.grpc_transport import GrpcTransport
from diloco_common.wire.manifest import model_digest
from diloco_worker.core import ranks
from diloco_worker.core.connection import Caller
from diloco_worker.core.device import in_pinned_memory, is_accelerator
from diloco_worker.core.ranks import Island, Rank
from diloco_worker.core.replica import Replica
from diloco_worker.core.shared_set import Models, Patterns, SharedSet, as_module
from diloco_worker.global_model import pull_global_model
from diloco_worker.learner import HURRY_S, LOOK_S, Learner, make_learner
from diloco_worker.number import taken
from diloco_worker.shell import exits, frozen_tensors, home
from diloco_worker.shell.arguments import check_either, check_function, check_how, check_site, check_who, check_word
from diloco_worker.shell.boundary import Start
from diloco_worker.shell.companions import Companions
from diloco_worker.shell.compared import Compared, several
from diloco_worker.shell.connections import Connections
from diloco_worker.shell.ending import Patience
from diloco_worker.shell.exits import as_one_line
from diloco_worker.shell.frozen_tensors import FrozenRule
from diloco_worker.shell.island import IslandGroup
from diloco_worker.shell.masters import Masters, find_copies
from diloco_worker.shell.network_thread import NetworkThread
from diloco_worker.shell.telemetry import LearnerTelemetry
from diloco_worker.shell.watch import ModelWatch
from diloco_worker.state import read_state


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
    snapshots: Literal["step", "background"] = "step",
    log: Literal["stderr"] | None = "stderr",
) -> Learner:
    """Join a run, and return once the model holds the latest version of every fragment.

    In the main thread, and where nobody handles SIGTERM yet: from then on it makes the learner leave at its next step
    boundary (`Learner.leave`), and ends the process by SystemExit(143).

    Args:
        shards: addresses of all shards, host:port, in any order; a string separates them by commas. `@FILE`: the
            address file of a shard that may move; it is read again when it changes.
        model: its trainable parameters are synchronised, and so are the buffers that a checkpoint of it holds (the
            statistics of BatchNorm, for example). The optimizer stays local. Of a list of modules the names begin with
            "0.", "1.", ..., of a dict with its keys ("actor.").
        run: id of the run, as the shards have it.
        learner_id: unique in the run; if empty it is the certificate's, or that of `state`, or made from host name,
            process id and something drawn.
        tls: folder that `diloco certs issue learner/ID` made: calls are encrypted, and prove who makes them. It is read
            again when it changes. None: plaintext.
        token: bearer token, where the shards ask for one; a Path is a file that holds it, and is read again.
        shared: names of the parameters that will ever be trained, or patterns of them (["head.*"]), or "all": from then
            on they may be frozen and unfrozen at any time. None: those that require a gradient now. All learners of a
            run alike.
        private: names or patterns of parameters that are trained and never sent: adapters, or a head, of this learner's
            own; and of buffers that stay local, such as a queue of samples (["*.queue*"]). They are not compared, and
            `finish` leaves them as they are. All learners of a run alike.
        mean_merge: names of parameters merged by plain mean; None means embeddings and the output head.
        companions: optimizers whose momentum is averaged among learners along with the parameters, at a cadence of its
            own (`sync.companions_every`): those of the model, made before `join`, with their state loaded, if there is
            any. Known are torch's Adam, AdamW, Muon and SGD; the state must be float32. All learners of a run alike.
            None: momentum stays local.
        masters: copies of the weights that the optimizer steps on and writes over the parameters, so that versions get
            there, too: float32 masters beside 16 bits, `z` of schedule-free, the slow weights of Lookahead. Give the
            optimizer, or several, whose state has them under a known name; or a dict of names and tensors, a list of
            pairs (parameter, tensor), or a function of a name. None: it steps on the parameters, as torch's do.
        optimizer: what steps on this model, one or all of them. Shards hear whether it is Adam or its kin, and merge by
            that (`sync.merge`). Refused where they train something else than what is shared (a target network that
            requires gradients, a head that lives in the loss). None: that is looked at in the first steps, as far as
            the learner gets to see an optimizer (`follow`, `ProgressLR`, callbacks), and said.
        after_version: for loops that clamp or project the parameters after each step: a function without arguments that
            does so. It is called whenever global values were written to the model, also by `finish` and in
            `global_values`, under `torch.no_grad()`. Means of values in a set, and the outer step, may lie outside.
        state: what `learner.state_dict()` gave in an earlier process, from the checkpoint that model and optimizer were
            loaded from. The learner goes on as the same one, with its counts. One shard that answers is enough:
            training goes on from the values that the model holds where a shard is away, and what it adds is contributed
            once the shard is back.
        site: where this learner is, in the words of the run: it takes versions from the shards' mirrors there, if there
            are any (docs/mirrors.md). What comes from one is compared with what the shard has announced.
        http: address on which to serve /metrics, /healthz, /readyz and /status; None serves nothing.
        address_file: write the address that is served here, as soon as it is known.
        history: record what happens to this learner in this folder, as JSON lines; None records nothing.
        wait_s: seconds to wait for shards that do not answer; None waits for ever, and says so every 10 s.
        island: a process group or a device mesh (torch.distributed.group.WORLD, for example): its ranks train this
            model together, by DDP or FSDP2, and are one learner. All of them call `join`, `step`, `poll`, `finish` and
            `close` alike (docs/islands.md). "alone": each of the processes that torchrun, or the like, has started
            trains a model of its own, and is a learner of its own. Without either, several processes are refused.
        frozen: "same": frozen parameters, and the packed weights of quantised layers, must be those of the other
            learners, bit for bit. "any": they may differ (a base in another dtype, or quantised); nobody looks at them.
        residuals: where the learner keeps what encodings have lost, 2 bytes per parameter (4 with some plugins): beside
            the model, or in pinned "host" memory, from where they come back each time that a contribution is encoded.
            There torch rounds the bytes of each tensor up to a power of two.
        snapshots: "step": what a contribution holds is copied before `step` returns. "background": on a CPU a thread
            copies it in the moments after, which takes one pass over a fragment out of the loop. Between steps the loop
            must then leave the parameters alone. On an accelerator and in an island it changes nothing.
        log: "stderr": what the learner says goes there, unless the process has handlers for its logs already, and an
            error of ours that nobody catches ends the process with its words alone. None: neither.

    Raises:
        ConfigError: an address or `state` is none, the shards are not of one run, or certificate or `state` of another.
        WrongCall: an argument is not what is asked for above.
        UnsupportedModel: the momentum of an optimizer cannot be averaged, or an island asks for it; or `optimizer`
            trains something else than what is shared.
        UnsupportedModel: the model cannot be synchronised (FSDP1 and DeepSpeed are refused, for example);
            the message says why, and what to do. Of several processes, rank 0 says it, and the others in short.
        CannotConnect: not all shards answered within `wait_s`.
        HandshakeFailed: the two sides cannot agree on TLS, which only a change of settings or certificates can mend.
        Refusal: a shard refuses this learner (other model, other run, wrong token, ...).
        WrongCall: this process is a child of a learner, and would join in its place.
    """
    _listen(log)
    addresses = addresses_of(shards)
    check_who(run, learner_id, tls, token)
    check_how(wait_s, mean_merge, history, address_file, http)
    check_function("after_version", after_version)
    check_either("frozen", frozen, ("same", "any"))
    check_either("residuals", residuals, ("device", "host"))
    check_either("snapshots", snapshots, ("step", "background"))
    credentials = Credentials(None if tls is None else Path(tls), token)
    saved = read_state(state, run)
    wanted = learner_id or (saved.learner_id if saved is not None else "")
    name = credentials.learner_id(wanted, run)
    home.check_may_join(run, name)
    if not wanted:
        home.close_earlier(run, name)
    module = as_module(model)
    _check_ranks(module, island)
    chosen = SharedSet(module, shared, private)
    compared = Compared(None if masters is not None else chosen, optimizer)
    group = IslandGroup(island) if ranks.is_together(island) else None
    if group is not None:
        name = group.agree_on(name, saved)
    replica, averaged = _replica_of(chosen, mean_merge, companions, masters, group)
    for one in several(companions):
        compared.has(one)
    replica.reads_later = snapshots == "background" and replica.device.type == "cpu" and group is None
    world = real_world()
    caller = Caller(run, name, f"{world.random.getrandbits(64):016x}", 0 if group is None else group.rank)
    if caller.rank:  # the leader speaks for all
        http, address_file, history, name = None, None, None, f"{name}/{caller.rank}"
    telemetry = _telemetry(caller, name, world, history, credentials)
    _say_what_it_takes(replica, chosen, telemetry, residuals)
    network = NetworkThread(None if http is None else partial(_http_server, http, telemetry, credentials))
    index = taken(run, caller.learner_id)
    learner = make_learner(
        replica, addresses, caller, partial(GrpcTransport, credentials=credentials), world, network, telemetry,
        Start() if saved is None else Start(saved.inner_step, saved.tokens, saved.tokens_merged, resumed=True),
        index=saved.index if index is None and saved is not None else index,
        frozen=frozen_tensors.declare(chosen) if frozen == "same" else (),
        watch=None if replica.is_spread else ModelWatch(chosen, averaged),
        council=None if group is None else group.council(), after_version=after_version,
        site=check_site(site),
    )  # fmt: skip
    if group is None:
        folder = None if tls is None else Path(tls)
        pull = partial(pull_global_model, addresses, run=run, tls=folder, bearer_token=token, average=True)
        learner.pull_average = lambda: pull().tensors
    learner.compared = compared
    home.joined(run, caller.learner_id, learner)
    learner.listen()
    with _closed_if_it_fails(learner, name):
        learner.start()
        if address_file is not None:
            with _written(f"address_file={str(address_file)!r} cannot be written: {{}}"):
                write_address(Path(address_file), "worker", name, http=network.http_address)
        _wait_until_joined(learner, world, wait_s)
        if group is not None:
            learner.number(int(group.agree(str(learner.index))))
    return learner


def digest_of(
    model: Models, mean_merge: Collection[str] | None = None,
    companions: Optimizer | Sequence[Optimizer] | None = None, *, shared: Patterns | None = None,
    private: Patterns = (),
) -> str:  # fmt: skip
    """The digest of a model, as shards ask for it (`run.model`); the arguments as in `join`.

    Raises UnsupportedModel, and ConfigError where `companions` are no optimizers of this model.
    """
    replica, _ = _synchronised(SharedSet(model, shared, private), mean_merge, companions)
    return model_digest(replica.specs)


def real_world() -> World:
    """Real time, chance and threads."""
    return World(time.monotonic, time.thread_time, random.SystemRandom(), _threads, memory.give_back)


def _synchronised(
    chosen: SharedSet, mean_merge: Collection[str] | None, companions: Optimizer | Sequence[Optimizer] | None
) -> tuple[Replica, Companions | None]:
    """All of a model, and what is averaged beside it. Raises UnsupportedModel and ConfigError."""
    if companions is None:
        return Replica(chosen, mean_merge), None
    averaged = Companions(companions, chosen)
    return Replica(chosen, mean_merge, averaged.by_name), averaged


def _replica_of(
    chosen: SharedSet, mean_merge: Collection[str] | None, companions: Optimizer | Sequence[Optimizer] | None,
    masters: Masters | None, group: IslandGroup | None,
) -> tuple[Replica, Companions | None]:  # fmt: skip
    """The part of a model that this process has, and what is averaged beside it. Raises UnsupportedModel and
    ConfigError."""
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
    """Raises WrongCall."""
    check_word("log", log, ("stderr", None))
    if log == "stderr":
        logs.listen()
        exits.say_in_one_line()
    else:
        logs.keep_quiet()


def _telemetry(
    caller: Caller, name: str, world: World, history: str | Path | None, credentials: Credentials
) -> LearnerTelemetry:
    """Raises ConfigError."""
    recorded = None
    if history is not None:
        with _written(f"history={str(history)!r}: {{}}; give a folder that can be written"):
            recorded = HistoryFile(Path(history), name)
    telemetry = LearnerTelemetry(caller, world.clock, WorkerMetrics(), Log(name), recorded)
    if credentials.tls() is not None:
        telemetry.metrics.certificates.follow(credentials.files)
    return telemetry


@contextmanager
def _written(words: str) -> Iterator[None]:
    """Raises ConfigError with these words, and what the system says in the place of {}."""
    try:
        yield
    except OSError as error:
        raise ConfigError(words.format(error.strerror)) from None


def _check_ranks(model: nn.Module, island: Island) -> None:
    """Raises UnsupportedModel for what several processes train together."""
    rank = _rank()
    try:
        ranks.check(model, rank, island)
    except UnsupportedModel as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            # Where one rank ends, torchrun ends the others at once, perhaps rank 0 before it has said why. This file
            # is what torchrun shows at the end of all that it prints.
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        if rank.rank > 0:
            raise UnsupportedModel(
                f"rank {rank.rank} of {rank.size} ends: this model cannot be joined like this; rank 0 says what to do"
            ) from None
        raise


def _rank() -> Rank:
    """What torch.distributed says; before it is initialised, what its launcher has left in the environment."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return Rank(group.get_rank(), group.get_world_size(), "a process group is initialised")
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal():
        return Rank(int(rank), int(size), "RANK and WORLD_SIZE are set, as by torchrun")
    return Rank()


def _threads(count: int, name: str) -> Executor:
    """Threads in which torch starts no second OpenMP team: two teams on the same cores are slower than one.

    `torch.set_num_threads` decides for the calling thread, and for threads that are yet to begin: put that back.
    """
    executor = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,))
    threads = torch.get_num_threads()
    executor.submit(int).result()
    torch.set_num_threads(threads)
    return executor


def _say_what_it_takes(replica: Replica, chosen: SharedSet, telemetry: LearnerTelemetry, residuals: str) -> None:
    """What is synchronised, by what, and where residuals lie."""
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
    """Raises CannotConnect, and what `Learner.begin` raises."""
    began = world.clock()
    patience = Patience(learner.telemetry.log, "waiting", began)
    while not learner.begin():
        missing = learner.telemetry.readiness[1]
        now = world.clock()
        if wait_s is not None and now - began > wait_s:
            raise CannotConnect(f"no run to join after {wait_s:g} s: {missing}")
        patience.still(missing, now)
        learner.poll(LOOK_S)

"""`diloco-worker`: run one worker with the built-in training, or evaluate the global model."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from diloco_common.command import end_on_sigterm, new_app, run_app
from diloco_common.errors import ConfigError
from diloco_common.extensions import is_extension
from diloco_common.options import NO_SETTINGS, SettingsOptions, setting, settings_from
from diloco_common.process import tune_allocator
from diloco_common.settings import Settings
from diloco_common.wire.manifest import TensorSpec, differences, model_digest
from diloco_demo.shapes import built_in_companions, gpt_tensors

if TYPE_CHECKING:
    from torch import Tensor

app = new_app("diloco-worker", "Run one worker with the built-in training.")


@dataclass(frozen=True)
class _OutputFiles:
    """Files to write besides the checkpoint; None: do not write it."""

    address: Path | None
    final_status: Path | None
    model: Path | None
    result: Path | None
    progress: Path | None


@app.default
def work(
    command: Annotated[
        Literal["train", "evaluate", "digest"],
        Parameter(help="train, evaluate the global model on held-out text, or print the model's digest (run.model)"),
    ] = "train",
    /,
    *,
    shards: Annotated[str | None, setting("worker.shards", "HOST:PORT,...", "addresses of all shards")] = None,
    learner_id: Annotated[str | None, setting("worker.learner_id", "ID", "unique in the run")] = None,
    site: Annotated[str | None, setting("run.site", "NAME", "its site, for mirrors")] = None,
    http: Annotated[str | None, setting("worker.http", "HOST:PORT", "address of metrics and status")] = None,
    data: Annotated[str | None, setting("data.source", "SOURCE", '"stdlib", a file or a folder')] = None,
    tls: Annotated[str | None, setting("security.tls", "FOLDER", "its certificate, by `diloco certs issue`")] = None,
    track: Annotated[
        str | None, setting("worker.track", "TRACKER", "tensorboard:DIR, wandb:PROJECT or csv:FILE")
    ] = None,
    address_file: Annotated[Path | None, Parameter(metavar="FILE", help="write the bound address here")] = None,
    final_status: Annotated[Path | None, Parameter(metavar="FILE", help="write the last status here")] = None,
    export: Annotated[
        Path | None, Parameter(metavar="FILE.safetensors", help="evaluate: write the global model here")
    ] = None,
    out: Annotated[Path | None, Parameter(metavar="FILE.json", help="evaluate: write the result here too")] = None,
    progress: Annotated[Path | None, Parameter(metavar="FILE.json", help="evaluate: write its progress here")] = None,
    options: SettingsOptions = NO_SETTINGS,
) -> None:
    """Run one worker with the built-in training, evaluate the global model, or print the digest of the model."""
    flags = {
        "worker.shards": shards, "worker.learner_id": learner_id, "run.site": site, "worker.http": http,
        "data.source": data, "security.tls": tls, "worker.track": track,
    }  # fmt: skip
    settings = settings_from(options, flags)
    if command == "digest":
        print(declared_digest(settings))
        return
    if not settings.worker.shards:
        raise ConfigError("no shards given: use --shards HOST:PORT,... or worker.shards")

    end_on_sigterm()
    tune_allocator()  # before threads and large buffers
    import torch

    from diloco_common.observe import logs

    logs.configure()
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    outputs = _OutputFiles(address_file, final_status, export, out, progress)
    (_evaluate if command == "evaluate" else _train)(settings, outputs)


def declared_digest(settings: Settings) -> str:
    """The digest (`run.model`) with which workers with these settings join: of the model, and of averaged momentum.

    For an optimizer of an extension, the model is built, since only the optimizer knows its state. Raises ConfigError
    and UnsupportedModel.
    """
    model, train = gpt_tensors(settings.model), settings.train
    if not train.average_momentum:
        return model_digest(model)
    if not is_extension(train.optimizer):
        return model_digest([*model, *built_in_companions(settings)])
    from diloco_demo.gpt import build_gpt
    from diloco_demo.training import make_optimizer
    from diloco_worker import digest_of

    made = build_gpt(settings.model, settings.run.seed)
    return digest_of(made, companions=make_optimizer(made, train))


def _train(settings: Settings, outputs: _OutputFiles) -> None:
    from diloco_common.observe.http import check_http_is_meant
    from diloco_common.observe.logs import Log
    from diloco_common.wire.addresses import write_json
    from diloco_demo import training
    from diloco_demo.checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
    from diloco_demo.data import TokenStream, load_corpus
    from diloco_demo.gpt import build_gpt
    from diloco_demo.tracking import StepTracker, check_tracker, open_tracker
    from diloco_worker import join

    worker, run, security = settings.worker, settings.run, settings.security
    check_http_is_meant("worker.http", worker.http, security)
    if worker.track:
        check_tracker(worker.track)
    device = training.choose_device(worker.device)
    corpus = load_corpus(settings.data.source)
    model = build_gpt(settings.model, run.seed).to(device)
    optimizer = training.make_optimizer(model, settings.train)
    checkpoint = worker.folder / "checkpoint.safetensors" if worker.folder else None
    saved = load_checkpoint(checkpoint, model, optimizer, run.id) if checkpoint else None

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # from here on, the learner leaves its shards properly
    learner = join(
        worker.shards, model, run=run.id, learner_id=worker.learner_id, site=run.site,
        tls=security.tls, token=security.token_file, http=worker.http,
        companions=optimizer if settings.train.average_momentum else None, optimizer=optimizer,
        state=None if saved is None else saved.learner, address_file=outputs.address, history=run.history,
        island="alone",  # the built-in loop trains alone, whatever launcher started this process
    )  # fmt: skip
    learner.hung_s = worker.hung_s
    came = _signals_that_call(learner.stop)
    stream = TokenStream(
        corpus.train, learner_id=learner.learner_id, seed=run.seed, context=settings.model.context,
        batch=settings.train.batch,
    )  # fmt: skip

    def save(progress: TrainingProgress) -> None:
        assert checkpoint is not None
        save_checkpoint(checkpoint, model, optimizer, learner.state_dict(), progress.data_position)

    saver = training.Saver(save, worker.checkpoint_every_s) if checkpoint else None
    log, curves = training.ProgressLog(Log(learner.learner_id), learner), None
    if worker.track:
        curves = StepTracker(open_tracker(worker.track, run=run.id, name=learner.learner_id), learner)
    try:
        training.train(
            learner, model, optimizer, stream, settings.train,
            budget=learner.tokens_budget, progress=saved.progress if saved is not None else TrainingProgress(),
            step_min_s=worker.step_min_s, saver=saver,
            on_step=lambda step: [watch(step) for watch in (log, curves) if watch is not None],
        )  # fmt: skip
        if signal.SIGTERM in came:
            learner.leave()
    finally:
        learner.close()
        if curves is not None:
            curves.close()
        if outputs.final_status is not None:
            write_json(outputs.final_status, learner.status())


def _signals_that_call(stop: Callable[[], None]) -> set[int]:
    """Call `stop` on SIGTERM and SIGINT from now on. Returns the set of signals received, which may grow."""
    came: set[int] = set()

    def handle(number: int, _: object) -> None:
        came.add(number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return came


def _evaluate(settings: Settings, outputs: _OutputFiles) -> None:
    import torch

    from diloco_common.wire.addresses import write_json
    from diloco_demo.data import load_corpus
    from diloco_demo.gpt import build_gpt, evaluate
    from diloco_worker import pull_global_model, write_model

    found = pull_global_model(
        settings.worker.shards,
        run=settings.run.id,
        tls=settings.security.tls,
        bearer_token=settings.security.token_file,
    )
    _check_is_built_in(found.tensors, settings)
    held_out = load_corpus(settings.data.source).held_out
    model = build_gpt(settings.model, settings.run.seed)  # bit for bit what the first worker seeded

    def judged(before: float) -> float:
        """The loss; each call is one half of the work."""

        def tell(share: float) -> None:
            if outputs.progress is not None:
                write_json(outputs.progress, {"share": before + share / 2})

        return evaluate(model, held_out, settings.model.context, tell=tell)

    first = judged(0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.tensors[name])
    result = {
        "eval_loss_first": first,
        "eval_loss_final": judged(0.5),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {str(i): version for i, version in sorted(found.versions.items())},
        "tokens_merged": found.tokens_merged,
    }
    if outputs.model is not None:
        write_model(outputs.model, found.tensors)
        result["export"] = str(outputs.model)
    if outputs.result is not None:
        write_json(outputs.result, result)
    print(json.dumps(result))


def _check_is_built_in(tensors: Mapping[str, Tensor], settings: Settings) -> None:
    """Raises ConfigError unless these are the tensors of the built-in model with these settings."""
    theirs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())]
    mine = [spec._replace(rule="run") for spec in sorted(gpt_tensors(settings.model))]
    if lines := differences(mine, theirs):
        shown = "; ".join(lines[:3])
        raise ConfigError(
            f"the run does not train the built-in model with these settings (the built-in <-> the run's): {shown}. For "
            "another size, give its model.* settings. For a model of your own: `diloco pull --out DIR` writes it"
        )


def main(argv: Sequence[str] | None = None) -> int:
    return run_app(app, argv)


if __name__ == "__main__":
    sys.exit(main())

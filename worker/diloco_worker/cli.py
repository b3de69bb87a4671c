"""`diloco-worker`: run one worker with the built-in training, or evaluate the global model."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from diloco_common.allocator import tune_allocator
from diloco_common.command import CommandParser, end_on_sigterm, run_command
from diloco_common.errors import ConfigError
from diloco_common.settings import Settings
from diloco_common.settings_loader import add_settings_arguments, settings_from_args

FLAGS = {"shards": "worker.shards", "learner_id": "worker.learner_id", "http": "worker.http", "data": "data.source"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(lambda: _run(argv), name="diloco-worker")


def _run(argv: Sequence[str] | None) -> None:
    parser = CommandParser(prog="diloco-worker", description="Run one worker with the built-in training.")
    parser.add_argument(
        "command", nargs="?", choices=("train", "evaluate"), default="train",
        help="train (default), or evaluate the global model on held-out text",
    )  # fmt: skip
    parser.add_argument("--shards", metavar="HOST:PORT,...", help="addresses of all shards (worker.shards)")
    parser.add_argument("--learner-id", metavar="ID", help="unique in the run (worker.learner_id)")
    parser.add_argument("--http", metavar="HOST:PORT", help="address of metrics and status (worker.http)")
    parser.add_argument("--data", metavar="SOURCE", help='"stdlib", a file or a folder (data.source)')
    parser.add_argument("--address-file", type=Path, metavar="FILE", help="write the bound address here")
    parser.add_argument("--final-status", type=Path, metavar="FILE", help="write the last status here")
    parser.add_argument("--export", type=Path, metavar="FILE.safetensors", help="evaluate: write the global model here")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="evaluate: write the result here too")
    add_settings_arguments(parser)
    args = parser.parse_args(argv)
    settings = settings_from_args(args, FLAGS)
    if not settings.worker.shards:
        raise ConfigError("no shards given: use --shards HOST:PORT,... or worker.shards")

    end_on_sigterm()
    tune_allocator()  # before threads and large buffers
    import torch

    from diloco_common import logs

    logs.configure()
    if settings.worker.threads:
        torch.set_num_threads(settings.worker.threads)
    (_evaluate if args.command == "evaluate" else _train)(settings, args)


def _train(settings: Settings, args: Namespace) -> None:
    from diloco_common.endpoints import write_json
    from diloco_common.security import read_bearer_token
    from diloco_worker.builtin import training
    from diloco_worker.builtin.checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
    from diloco_worker.builtin.data import TokenStream, load_corpus
    from diloco_worker.builtin.gpt import build_gpt
    from diloco_worker.joining import join

    worker, run = settings.worker, settings.run
    device = training.choose_device(worker.device)
    corpus = load_corpus(settings.data.source, settings.data.held_out)
    model = build_gpt(settings.model, run.seed).to(device)
    optimizer = training.make_optimizer(model, settings.train)
    checkpoint = worker.folder / "checkpoint.safetensors" if worker.folder else None
    resumed = load_checkpoint(checkpoint, model, optimizer, run.id) if checkpoint else None
    progress = resumed or TrainingProgress()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # from here on, the learner says goodbye to its shards
    learner = join(
        worker.shards, model, run=run.id, learner_id=worker.learner_id, token=read_bearer_token(settings.security),
        inner_step=progress.inner_step, tokens=progress.tokens, http=worker.http,
        address_file=args.address_file, history=run.history, resumed=resumed is not None,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: learner.stop())
    stream = TokenStream(
        corpus.train, learner_id=learner.learner_id, seed=run.seed, context=settings.model.context,
        batch=settings.train.batch,
    )  # fmt: skip
    saver = None
    if checkpoint is not None:
        saver = training.Saver(
            lambda p: save_checkpoint(checkpoint, model, optimizer, p, run.id), worker.checkpoint_every_s
        )
    try:
        training.train(
            learner, model, optimizer, stream, settings.train,
            budget=learner.tokens_budget, progress=progress, step_delay_s=worker.step_delay_s,
            step_min_s=worker.step_min_s, saver=saver,
            on_step=training.ProgressLog(learner.telemetry.log, learner),
        )  # fmt: skip
    finally:
        learner.close()
        if args.final_status is not None:
            write_json(args.final_status, learner.status())


def _evaluate(settings: Settings, args: Namespace) -> None:
    import torch

    from diloco_common.endpoints import write_json
    from diloco_common.security import read_bearer_token
    from diloco_worker.builtin.data import load_corpus
    from diloco_worker.builtin.evaluation import evaluate
    from diloco_worker.builtin.gpt import build_gpt
    from diloco_worker.export import write_model
    from diloco_worker.global_model import pull_global_model

    found = pull_global_model(
        settings.worker.shards, run=settings.run.id, bearer_token=read_bearer_token(settings.security)
    )
    held_out = load_corpus(settings.data.source, settings.data.held_out).held_out
    model = build_gpt(settings.model, settings.run.seed)  # bit for bit what the first worker seeded
    first = evaluate(model, held_out, settings.model.context)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.tensors[name])
    result = {
        "eval_loss_first": first,
        "eval_loss_final": evaluate(model, held_out, settings.model.context),
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {str(i): version for i, version in sorted(found.versions.items())},
        "tokens_merged": found.tokens_merged,
    }
    if args.export is not None:
        write_model(args.export, found.tensors)
        result["export"] = str(args.export)
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())

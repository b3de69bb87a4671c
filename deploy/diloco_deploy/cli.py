"""The commands of this distribution, found by `diloco` (`diloco_common/command.py`)."""

from __future__ import annotations

from diloco_common.command import LOOK, MODEL, RUN, SETTINGS, TRUST, Command

COMMANDS = (
    Command(
        "up", "diloco_deploy.run.commands:up",
        "run a cluster on this machine until its token budget is reached", RUN,
    ),
    Command(
        "init", "diloco_deploy.run.commands:init", "create a folder to start from: run.toml and train.py", RUN,
    ),
    Command(
        "resume", "diloco_deploy.run.commands:resume",
        "continue a run, as it was or on another number of shards", RUN,
    ),
    Command(
        "scale", "diloco_deploy.run.commands:scale", "change the number of workers of a running cluster", RUN,
    ),
    Command("status", "diloco_deploy.status:status", "show a running cluster", LOOK),
    Command(
        "record", "diloco_deploy.status:record", "show whose work is in each version, and its weight", LOOK,
    ),
    Command("web", "diloco_deploy.web.command:web", "the live page of a run, in a browser", LOOK),
    Command("logs", "diloco_deploy.commands:logs", "show the logs of a cluster on this machine", LOOK),
    Command("health", "diloco_deploy.commands:health", "ask one process whether it is healthy", LOOK),
    Command(
        "doctor", "diloco_deploy.doctor.command:doctor",
        "check the connection to the shards, or a machine", LOOK,
    ),
    Command(
        "explain", "diloco_deploy.codes:explain", "explain a code, and what to do", LOOK,
    ),
    Command(
        "checkpoint", "diloco_deploy.checkpoint.commands:app", "take, list, verify and copy checkpoints", MODEL,
    ),
    Command(
        "restore", "diloco_deploy.checkpoint.commands:restore",
        "make data folders from a checkpoint, for any number of shards", MODEL,
    ),
    Command(
        "promote", "diloco_deploy.checkpoint.commands:promote",
        "make a standby the shard, once the shard will not come back", MODEL,
    ),
    Command(
        "export", "diloco_deploy.checkpoint.commands:export",
        "write the model as safetensors with its own parameter names", MODEL,
    ),
    Command(
        "pull", "diloco_deploy.checkpoint.commands:pull",
        "write the global model of a running cluster, for from_pretrained", MODEL,
    ),
    Command(
        "certs", "diloco_deploy.trust.commands:certs",
        "make the certificates of a run, show them, and revoke them", TRUST,
    ),
    Command("token", "diloco_deploy.trust.commands:token", "make the shared token", TRUST),
    Command(
        "config", "diloco_deploy.commands:config",
        "show the settings of a run, and where each one comes from", SETTINGS,
    ),
    Command(
        "completion", "diloco_deploy.commands:completion", "print the completion of bash, zsh or fish", SETTINGS,
    ),
)  # fmt: skip

"""One run of quality.py, with all its settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from diloco_common.settings import ModelSettings, OuterSettings, RunSettings, Settings, SyncSettings, TrainSettings


@dataclass(frozen=True)
class Spec:
    """One run. The defaults here do not follow those of the product. `tokens`: merged tokens of all learners."""

    method: str = "decoupled"
    """"decoupled" (the production cores), "classic" or "data-parallel" (the references)."""
    learners: int = 4
    tokens: int = 491_520
    seed: int = 0
    inner_lr: float = 2e-3
    """Of AdamW: of all parameters, or with Muon of embedding and head."""
    optimizer: str = "adamw"
    muon_lr: float = 5e-3
    schedule: str = "cosine"
    lr_final: float = 0.1
    sync_every: int = 24
    fragments: int = 24
    quorum: int | str = 1
    grace: float | str = "adaptive"
    overlap_steps: int = 2
    merge: str = "rda"
    on_commit: str = "carry"
    push: str = "int8"
    pull: str = "bfloat16"
    error_feedback: bool = True
    outer_lr: float = 0.7
    momentum: float = 0.0
    speeds: tuple[float, ...] = ()
    noise: float = 0.0
    layers: int = 2
    width: int = 64
    context: int = 64
    batch: int = 4

    def settings(self) -> Settings:
        return Settings(
            run=RunSettings(tokens=self.tokens, seed=self.seed),
            sync=SyncSettings.model_validate({
                "fragments": self.fragments, "sync_every": self.sync_every, "quorum": self.quorum, "grace": self.grace,
                "overlap_steps": self.overlap_steps, "merge": self.merge, "on_commit": self.on_commit,
                "push": self.push, "pull": self.pull, "error_feedback": self.error_feedback,
            }),
            outer=OuterSettings(optimizer="nesterov", lr=self.outer_lr, momentum=self.momentum),
            model=ModelSettings(layers=self.layers, heads=self.width // 32, width=self.width, context=self.context),
            train=TrainSettings.model_validate({
                "batch": self.batch, "optimizer": self.optimizer, "lr": self.inner_lr, "muon_lr": self.muon_lr,
                "schedule": self.schedule, "lr_final": self.lr_final,
            }),
        )  # fmt: skip


def describe(spec: Spec) -> str:
    """The differences from the defaults, in words."""
    base = asdict(Spec())
    return " ".join(f"{k}={v}" for k, v in asdict(spec).items() if v != base[k]) or "base"

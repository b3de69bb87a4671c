"""The model of a plan: a number of parameters, or a module that is built without memory. Imports torch."""

from __future__ import annotations

import importlib
import os
import sys

from diloco_common.errors import ConfigError


def parameters_of(name: str) -> int:
    """Trainable parameters of what `pkg.module:build` makes, on the meta device. Raises ConfigError."""
    import torch
    from torch import nn

    where, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"--model {name}: write package.module:function; the function makes the model")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(where), attribute)
        with torch.device("meta"):
            model = build()
    except Exception as error:  # whatever code of the user's raises
        raise ConfigError(f"--model {name}: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {name}: gave a {type(model).__name__}, not a torch module")
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

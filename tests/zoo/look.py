"""What the model of a program in the zoo is worth: `python look.py PROGRAM FOLDER [--first]`.

Makes the program's own model, loads FOLDER/model.safetensors strictly, and prints what the program's own `evaluate`
says of it. With `--first` it writes the untrained model there instead: what `diloco pull --base` asks for.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def main() -> None:
    program, file = Path(sys.argv[1]), Path(sys.argv[2], "model.safetensors")
    made = runpy.run_path(str(program), run_name=program.stem)
    torch.manual_seed(0)
    models: Any = made["make_model"]()
    module = models if isinstance(models, nn.Module) else nn.ModuleDict(models)
    if "--first" in sys.argv:
        file.parent.mkdir(exist_ok=True)
        save_file({name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()}, file)
        return
    module.load_state_dict(load_file(file), strict=True)
    print(json.dumps({"pulled": made["evaluate"](models)}))


if __name__ == "__main__":
    main()

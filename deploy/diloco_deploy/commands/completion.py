"""`diloco completion`."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="the shell that completes")],
    /,
    *,
    install: Annotated[
        bool, Parameter(help="put it where the shell finds it, and say where", show_default=False)
    ] = False,
) -> int:
    """Print the completion of `diloco` for a shell: `source <(diloco completion bash)` tries it in this one."""
    from diloco_deploy.cli import program

    app = program()
    if install:
        print(f"{app.install_completion(shell=shell, add_to_startup=True)}: written; it works in the next {shell}")
    else:
        print(app.generate_completion(shell=shell))
    return 0

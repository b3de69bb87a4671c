"""`diloco explain`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from diloco_common.options import Json


def explain(
    code: Annotated[
        str, Parameter(metavar="CODE", help="such as TLS_NEEDED, in any spelling", show_default=False)
    ] = "",
    /,
    *,
    json: Json = False,
) -> int:
    """Say what an error, alert, finding or outcome means, what to look at and what to do. Without a code: list all."""
    from diloco_deploy.explain.command import explain as said

    return said(code, as_json=json)

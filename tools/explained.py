"""Writes the parts of docs/errors.md and docs/runbook.md that `diloco explain` has (deploy/diloco_deploy/catalogue.py).

`python tools/explained.py` writes them, `--check` says whether they are up to date.
"""

from __future__ import annotations

import sys

from diloco_deploy.catalogue import with_parts
from written import ROOT, written


def main() -> int:
    targets = [ROOT / "docs" / name for name in ("errors.md", "runbook.md")]
    return max(written(target, with_parts(target.read_text(encoding="utf-8")), __doc__) for target in targets)


if __name__ == "__main__":
    sys.exit(main())

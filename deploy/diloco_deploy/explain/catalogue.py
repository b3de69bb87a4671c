"""Every code there is, and which one was meant."""

from __future__ import annotations

import difflib

from diloco_common.errors import ConfigError
from diloco_deploy.explain.alerts_of_learners import LEARNER_ALERTS
from diloco_deploy.explain.alerts_of_runs import RUN_ALERTS
from diloco_deploy.explain.entry import Entry, Kind
from diloco_deploy.explain.findings import FINDINGS
from diloco_deploy.explain.outcomes import EXITS, OUTCOMES
from diloco_deploy.explain.troubles import ERRORS, WORDS

ENTRIES: tuple[Entry, ...] = (
    *ERRORS, *WORDS, *FINDINGS, *OUTCOMES, *RUN_ALERTS, *LEARNER_ALERTS, *EXITS,
)  # fmt: skip
CODES = {entry.code: entry for entry in ENTRIES}


def of_kind(*kinds: Kind) -> list[Entry]:
    """In the order of their pages."""
    return [entry for entry in ENTRIES if entry.kind in kinds]


def find(code: str) -> Entry:
    """The entry of a code, in any spelling: late, cannot-connect, [TLS_NEEDED]. Raises ConfigError with suggestions."""
    wanted = _plain(code)
    by_plain = {_plain(known): entry for known, entry in CODES.items()}
    if (entry := by_plain.get(wanted)) is not None:
        return entry
    near = difflib.get_close_matches(wanted, by_plain, n=3, cutoff=0.7)
    holding = [known for known in by_plain if len(wanted) > 2 and wanted in known]
    meant = [by_plain[known].code for known in dict.fromkeys((*near, *holding))][:6]
    hint = f"; did you mean {', '.join(meant)}?" if meant else ""
    raise ConfigError(f"no code is called {code[:60]!a}{hint} (`diloco explain` lists all)")


def _plain(code: str) -> str:
    return "".join(c for c in code.lower() if c.isalnum())

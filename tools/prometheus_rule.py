"""Writes the rules of deploy/prometheus/rules as a PrometheusRule for the Prometheus operator.

`python tools/prometheus_rule.py` writes, `--check` says whether it is up to date. Kustomize cannot put the text of a
file into a resource of a kind that it does not know.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy/prometheus/rules"
TARGET = ROOT / "deploy/kubernetes/components/monitoring/rules.yaml"
HEAD = """\
# Written by tools/prometheus_rule.py from deploy/prometheus/rules; change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: diloco
  labels:
    release: kube-prometheus-stack
spec:
  groups:
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    check = parser.parse_args().check
    text = HEAD + "".join(_groups(path.read_text()) for path in sorted(RULES.glob("*.yml")))
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    if check:
        print(f"{TARGET.relative_to(ROOT)} is out of date: run tools/prometheus_rule.py", file=sys.stderr)
        return 1
    TARGET.write_text(text)
    return 0


def _groups(text: str) -> str:
    """What follows `groups:`, indented to where the resource has it."""
    lines = text.partition("groups:\n")[2].splitlines()
    return "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

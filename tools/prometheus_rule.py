"""Writes the rules of deploy/prometheus/rules as a PrometheusRule for the Prometheus operator.

`python tools/prometheus_rule.py` writes it, `--check` says whether it is up to date. Kustomize cannot do this: it does
not know PrometheusRule, so it cannot put the text of a file into one.
"""

from __future__ import annotations

import sys

from written import ROOT, written

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
    text = HEAD + "".join(_groups(path.read_text()) for path in sorted(RULES.glob("*.yml")))
    return written(TARGET, text, __doc__)


def _groups(text: str) -> str:
    """The text after `groups:`, indented for the resource."""
    lines = text.partition("groups:\n")[2].splitlines()
    return "".join(f"  {line}\n" if line else "\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

"""What a PromQL query names: enough of the grammar to find metrics, labels they are asked for, and where they lie."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

FROM_TARGETS = {"job", "instance", "run"}
"""Labels that a series gets by being scraped."""
_GRAFANA = (("$__rate_interval", "5m"), ("$run", ".*"), ("$instance", ".*"))
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_CLAUSE = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_SELECTOR = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\s*(\(|\{((?:[^}\"]|\"[^\"]*\")*)\})?")
_WORDS = {"and", "or", "unless", "bool", "offset"}


@dataclass(frozen=True)
class Query:
    """One expression, and the words that say where it stands."""

    where: str
    text: str

    @property
    def selectors(self) -> list[tuple[str, dict[str, str]]]:
        """Each metric, with the labels that must equal something."""
        bare, found = _RANGE.sub(" ", _CLAUSE.sub(" ", self.text)), []
        for name, follows, matchers in _SELECTOR.findall(bare):
            if follows != "(" and name not in _WORDS:
                found.append((name, {k: v if op == "=" else "" for k, op, v in _MATCHER.findall(matchers)}))
        return found

    @property
    def grouped_by(self) -> set[str]:
        """Labels of `by`, `on` and their like."""
        return {label.strip() for labels in _CLAUSE.findall(self.text) for label in labels.split(",")} - {""}


def in_rules(folder: Path) -> Iterator[Query]:
    for path in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield Query(f"{path.name}: {rule.get('record') or rule['alert']}", rule["expr"])


def in_dashboards(folder: Path) -> Iterator[Query]:
    """With Grafana's variables filled in."""
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text())
        for note in board["annotations"]["list"]:
            yield _filled(f"{path.name}: {note['name']}", note["expr"])
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield _filled(f"{path.name}: {panel['title']}", target["expr"])


def _filled(where: str, text: str) -> Query:
    for variable, value in _GRAFANA:
        text = text.replace(variable, value)
    return Query(where, text)

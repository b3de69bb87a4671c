"""Histories: what was written is read again, whatever killed the writer."""

from __future__ import annotations

from pathlib import Path

from diloco_common.observe.history import HistoryFile
from diloco_simulator.verify.histories import read_history


def ticking():
    times = iter(range(100))
    return lambda: float(next(times))


def test_processes_of_one_name_follow_each_other(tmp_path: Path) -> None:
    first = HistoryFile(tmp_path / "history", "ann", ticking())
    first.write("born", role="learner")
    first.write("stepped", step=1)
    HistoryFile(tmp_path / "history", "ann", ticking()).write("born", role="learner")

    lines = read_history(tmp_path / "history" / "ann.jsonl")
    assert [line["what"] for line in lines] == ["born", "stepped", "born"]
    assert lines[1] == {"t": 1.0, "what": "stepped", "step": 1}


def test_a_torn_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    HistoryFile(tmp_path, "ann", ticking()).write("stepped", step=1)
    path = tmp_path / "ann.jsonl"
    with path.open("ab") as file:
        file.write(b'{"t":1.0,"what":"stepp')

    HistoryFile(tmp_path, "ann", ticking()).write("born")

    assert [line["what"] for line in read_history(path)] == ["stepped", "born"]

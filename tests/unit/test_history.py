"""Histories: what was written is read again, whatever killed the writer."""

from __future__ import annotations

from pathlib import Path

from diloco_common.history import History, fingerprint, read_history


def ticking():
    times = iter(range(100))
    return lambda: float(next(times))


def test_the_lives_of_a_process_follow_each_other(tmp_path: Path) -> None:
    first = History(tmp_path / "history", "ann", ticking())
    first.write("born", role="worker")
    first.write("stepped", step=1)
    History(tmp_path / "history", "ann", ticking()).write("born", role="worker")

    lines = read_history(tmp_path / "history" / "ann.jsonl")
    assert [line["what"] for line in lines] == ["born", "stepped", "born"]
    assert lines[1] == {"t": 1.0, "what": "stepped", "step": 1}


def test_a_torn_line_costs_nothing_but_itself(tmp_path: Path) -> None:
    History(tmp_path, "ann", ticking()).write("stepped", step=1)
    path = tmp_path / "ann.jsonl"
    with path.open("ab") as file:
        file.write(b'{"t":1.0,"what":"stepp')

    History(tmp_path, "ann", ticking()).write("born")

    assert [line["what"] for line in read_history(path)] == ["stepped", "born"]


def test_a_line_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    history = History(tmp_path, "ann", ticking())
    for step in range(3):
        history.write("stepped", step=step)
        assert len(read_history(tmp_path / "ann.jsonl")) == step + 1


def test_the_fingerprint_is_crc32c() -> None:
    assert fingerprint(b"123456789") == "e3069283"

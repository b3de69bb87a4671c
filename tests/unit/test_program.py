"""`diloco`: the commands of what is installed, and how to get the others."""

from __future__ import annotations

from importlib import metadata

import pytest

from diloco_common import program


def test_each_command_is_said_to_be_where_it_is() -> None:
    tables = {point.dist.name: point.load() for point in metadata.entry_points(group="diloco.commands") if point.dist}
    brought = {distribution: [command.name for command in table] for distribution, table in tables.items()}
    assert brought == {distribution: list(names) for distribution, names in program.ELSEWHERE.items()}


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    of_ops = [command for command in program.installed() if command.name in program.ELSEWHERE["decoupled-diloco-ops"]]
    monkeypatch.setattr(program, "installed", lambda: of_ops)
    assert program.main(["plan", "--params", "1B"]) == 2
    assert capsys.readouterr().err == (
        "diloco plan: not installed; pip install decoupled-diloco-lab (in a clone: pip install ./simulator) "
        "[BAD_CONFIG]\n"
    )

    assert program.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "Not installed (pip install decoupled-diloco-lab): plan, simulate, lab" in said
    assert "decoupled-diloco-ops" not in said


def test_a_distribution_that_cannot_be_imported_takes_no_other_along(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    broken = metadata.EntryPoint("broken", "no_such_module:COMMANDS", "diloco.commands")
    points = [broken, *metadata.entry_points(group="diloco.commands")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)

    assert {"status", "plan"} <= {command.name for command in program.installed()}
    assert "commands of no_such_module:COMMANDS cannot be imported" in capsys.readouterr().err

"""Open files are kept for what must not fail, however many connections the settings ask for."""

from __future__ import annotations

import pytest

from builders import make_settings
from diloco_server.shell.quotas import KEPT, connections_allowed, connections_wanted


@pytest.mark.parametrize(
    ("shard", "files", "wanted", "allowed"),
    [
        ({}, 1 << 20, 4096, 4096),
        ({}, 4544, 4096, 4096),
        ({}, 1024, 4096, 1024 - KEPT),
        ({}, 256, 4096, 16),
        ({"max_learners": 10}, 1024, 40, 40),
        ({"max_connections": 100}, 1024, 100, 100),
        ({"max_connections": 100_000}, 20_000, 100_000, 20_000 - KEPT),
    ],
    ids=["as a rule", "just enough", "few", "hardly any", "few learners", "by hand", "more by hand than there are"],
)
def test_connections_leave_files_for_the_shard(shard: dict[str, int], files: int, wanted: int, allowed: int) -> None:
    settings = make_settings(shard=shard).shard
    assert connections_wanted(settings) == wanted
    assert connections_allowed(settings, files) == allowed

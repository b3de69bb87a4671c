"""docs/launchers.md: what it shows is what the tests on real clusters run."""

from __future__ import annotations

from pathlib import Path

from pages import followed


def test_every_block_is_run_on_a_real_cluster(repository: Path) -> None:
    tests = repository / "tests/launchers"
    assert list(followed(repository / "docs/launchers.md")) == ["ray"]
    assert 'blocks(ROOT / "docs/launchers.md")["ray"]' in (tests / "test_ray.py").read_text()
    assert 'blocks(ROOT / "docs/operations.md")["slurm"]' in (tests / "test_slurm.py").read_text()

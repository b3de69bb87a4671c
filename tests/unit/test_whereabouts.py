"""Where a shard is: the address that was given, or the one in its file, as it is now."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_common.errors import ConfigError
from diloco_common.ports import Unavailable
from diloco_common.trust.credentials import Whereabouts, addresses_of
from diloco_common.wire.addresses import write_address


def test_an_address_stays() -> None:
    assert Whereabouts("ps-0:50051").now() == "ps-0:50051"


def test_a_file_is_read_again_when_it_changes_and_its_last_word_holds(tmp_path: Path) -> None:
    file = tmp_path / "shard-0.json"
    where = Whereabouts(f"@{file}")
    with pytest.raises(Unavailable, match="has not started yet"):
        where.now()
    for node in ("n1", "n2"):
        write_address(file, "shard", "shard-0", grpc=f"{node}:50051", http=f"{node}:8080")
        assert where.now() == f"{node}:50051"
    for damaged in ("", "[]", "n3:50051"):
        file.write_text(damaged)
        assert where.now() == "n2:50051"
    file.unlink()
    assert where.now() == "n2:50051"


def test_addresses_and_files_may_be_mixed() -> None:
    assert addresses_of("ps-0:50051, @/run/shard-1.json,") == ["ps-0:50051", "@/run/shard-1.json"]
    with pytest.raises(ConfigError, match="shard @/a is named twice"):
        addresses_of("@/a,@/a")

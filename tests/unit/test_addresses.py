"""Addresses: what is understood and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_common.errors import ConfigError
from diloco_common.ports import Unavailable
from diloco_common.trust.credentials import Whereabouts, addresses_of
from diloco_common.wire.addresses import is_loopback, parse_address, write_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("ps_0.internal:65535", "ps_0.internal", 65535),
        ("[::1]:50051", "::1", 50051),
    ],
)
def test_an_address_is_parsed_and_written_back(text, host, port):
    address = parse_address(text)

    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "port is missing"),
        ("localhost", "port is missing"),
        (":50051", "host is missing"),
        ("localhost:65536", "number from 0 to 65535"),
        ("localhost:٣", "number from 0 to 65535"),
        ("::1:50051", "needs brackets"),
        ("[localhost]:50051", "no IPv6 address"),
        ("http://localhost:50051", "scheme"),
        ("a/../b:1", "letters, digits"),
        ("\x1b[31m:1", "letters, digits"),
    ],
)
def test_nonsense_is_refused_with_the_reason_and_an_example(text, why):
    with pytest.raises(ConfigError, match=why) as refused:
        parse_address(text)

    assert "127.0.0.1:50051" in str(refused.value)
    assert str(refused.value).isprintable()


def test_only_hosts_that_nobody_else_can_reach_are_loopback():
    ours = ["127.0.0.1", "127.8.9.10", "localhost", "LOCALHOST", "::1", "::ffff:127.0.0.1"]
    others = ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "ps-0"]
    assert [host for host in (*ours, *others) if is_loopback(host)] == ours


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

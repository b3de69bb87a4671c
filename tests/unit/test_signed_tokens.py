"""Signed tokens: what they prove, and what proves nothing."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from diloco_common.errors import ConfigError, Unauthenticated
from diloco_common.settings import SecuritySettings
from diloco_common.trust.identity import Proof, subject_of
from diloco_common.trust.tokens import SIGNED_FOR, read_bearer_token, read_token_key, sign_token, verify_token
from diloco_deploy.cli import main

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PROOF = Proof(subject_of("r", "learner/a"), "ab12", 2_000_000_000)
TOKEN = sign_token(KEY, PROOF)


def test_a_token_proves_what_was_signed() -> None:
    assert verify_token(KEY.public_key(), TOKEN) == PROOF


def test_the_bytes_are_those_of_the_page() -> None:
    """Made by hand from the format, so that others can make them."""
    claims = b'{"run":"r","scope":"learner","name":"a","serial":"ab12","expires":2000000000}'
    first = base64.urlsafe_b64encode(claims).rstrip(b"=")
    second = base64.urlsafe_b64encode(KEY.sign(b"diloco signed token 1\n" + first)).rstrip(b"=")
    assert TOKEN.encode() == first + b"." + second


@given(st.integers(0, len(TOKEN) - 1), st.characters(codec="ascii", min_codepoint=33))
def test_a_token_with_any_character_changed_proves_nothing(place: int, character: str) -> None:
    changed = TOKEN[:place] + character + TOKEN[place + 1 :]
    if changed != TOKEN:
        with pytest.raises(Unauthenticated):
            verify_token(KEY.public_key(), changed)


def signed(claims: object, key: Ed25519PrivateKey = KEY, prefix: bytes = SIGNED_FOR) -> str:
    text = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    first = base64.urlsafe_b64encode(text).rstrip(b"=")
    return (first + b"." + base64.urlsafe_b64encode(key.sign(prefix + first)).rstrip(b"=")).decode()


CLAIMS = {"run": "r", "scope": "learner", "name": "a", "serial": "ab12", "expires": 2_000_000_000}


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "a-shared-token-of-before",
        TOKEN + ".",
        TOKEN + "=",
        TOKEN.replace(".", ".\n"),
        "x" * 5000 + TOKEN,
        signed(CLAIMS, Ed25519PrivateKey.generate()),
        signed(CLAIMS, prefix=b""),
        signed([1]),
        signed(b"\xff"),
        signed({**CLAIMS, "alg": "none"}),
        signed({**CLAIMS, "scope": "pope"}),
        signed({**CLAIMS, "name": "../x"}),
        signed({**CLAIMS, "expires": "never"}),
        signed({**CLAIMS, "expires": True}),
        signed({key: value for key, value in CLAIMS.items() if key != "run"}),
    ],
)
def test_what_is_no_token_of_this_key_proves_nothing(token: str) -> None:
    with pytest.raises(Unauthenticated):
        verify_token(KEY.public_key(), token)


def test_the_command_writes_one_that_shards_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    main(["certs", "init", "--run", "r"])
    assert main(["token", "issue", "learner/a", "--out", "t", "--days", "2"]) == 0
    assert "security.token_key=certs/token.pub" in capsys.readouterr().out

    token = read_bearer_token(SecuritySettings(token_file=Path("t")))
    assert token is not None
    proof = verify_token(read_token_key(Path("certs/token.pub")), token)

    assert str(proof.subject) == "learner/a"


def test_only_an_ed25519_public_key_checks_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["certs", "init"])
    main(["token", "issue", "learner/a", "--out", "t"])
    for wrong in ("certs/token.key", "certs/ca.pem", "absent"):
        with pytest.raises(ConfigError, match=r"security\.token_key"):
            read_token_key(Path(wrong))

"""Keys of scopes: derived, apart, and never without a secret that others cannot read."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

import pytest

from state.model import ModelIdentity
from state.prefix import chain_of, chain_root, next_block, pack_tokens
from state.secret import ChainKeys, SecretError, derived, engine_salt, read_deployment_key

if TYPE_CHECKING:
    from pathlib import Path

    from state.prefix import ChainKey

SECRET = bytes(range(32))
IDENTITY = ModelIdentity(model="m", block_tokens=4)


def write_key(path: Path, key: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(key)
    path.chmod(mode)
    return path


def test_a_key_is_read_without_white_space(tmp_path: Path) -> None:
    assert read_deployment_key(write_key(tmp_path / "key", b" " + b"k" * 32 + b"\n")) == b"k" * 32


@pytest.mark.parametrize(
    ("key", "mode", "words"),
    [
        (b"k" * 31, 0o600, "expected 32 to 4096 bytes, got 31"),
        (b"k" * 5000, 0o600, "expected 32 to 4096 bytes"),
        (b"k" * 32, 0o640, "only its owner"),
        (b"k" * 32, 0o604, "only its owner"),
    ],
)
def test_a_key_that_is_none_is_refused(tmp_path: Path, key: bytes, mode: int, words: str) -> None:
    with pytest.raises(SecretError, match=words):
        read_deployment_key(write_key(tmp_path / "key", key, mode))


def test_a_key_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="no-key: No such file"):
        read_deployment_key(tmp_path / "no-key")


def test_derivation_is_that_of_rfc_5869() -> None:
    secret, info = bytes.fromhex("0b" * 22), b""
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert derived(secret, info).hex() == expected  # test case 3: no salt, no info, first 32 bytes


def test_salts_differ_by_scope_epoch_and_framing() -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("a", "bd"), ("", "abc")]
    salts = {engine_salt(SECRET, scope, epoch) for scope, epoch in pairs}
    assert len(salts) == len(pairs)
    assert engine_salt(SECRET, "a", "bc") in salts
    assert engine_salt(os.urandom(32), "a", "bc") not in salts
    assert all(len(salt) == 43 and "=" not in salt for salt in salts)


def test_without_a_secret_all_scopes_have_the_seed() -> None:
    assert ChainKeys(7).of("") == ChainKeys(7).of("salt:x") == 7


def test_with_a_secret_each_scope_has_a_key_of_its_own() -> None:
    keys = ChainKeys(7, SECRET)
    assert len({keys.of(""), keys.of("salt:x"), keys.of("salt:y")}) == 3
    assert keys.of("salt:x") == ChainKeys(8, SECRET).of("salt:x")
    for scope in range(10_000):
        keys.of(f"salt:{scope}")
    assert keys.of("salt:x") == ChainKeys(0, SECRET).of("salt:x")


@pytest.mark.parametrize("key", [5, b"k" * 32])
def test_a_chain_is_its_steps(key: ChainKey) -> None:
    tokens = pack_tokens(range(10))
    root = chain_root(IDENTITY, key)
    first = next_block(root, tokens[:16], key)
    assert chain_of(root, tokens, 4, key) == (first, next_block(first, tokens[16:32], key))


def test_keyed_ids_are_blake2b_of_parent_and_tokens() -> None:
    key, tokens = b"k" * 32, pack_tokens(range(4))
    root = chain_root(IDENTITY, key)
    [block] = chain_of(root, tokens, 4, key)
    assert block == hashlib.blake2b(root + tokens, digest_size=16, key=key).digest()
    assert not hmac.compare_digest(block, chain_of(root, tokens, 4, b"l" * 32)[0])

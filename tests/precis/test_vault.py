"""What is sealed opens only as what it was, where it was, under a secret that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precis.errors import SnapshotCorrupt
from precis.wire.vault import OVERHEAD, Vault

OLD, NEW = "an old secret that is quite long enough", "a new secret that is quite long enough!"


@given(st.binary(max_size=200), st.text(max_size=10), st.text(max_size=10))
def test_what_was_sealed_comes_back_and_is_not_to_be_seen(data: bytes, owner: str, place: str) -> None:
    vault = Vault(OLD)
    sealed = vault.seal(data, owner, place)
    assert vault.unseal(sealed, owner, place) == data
    assert len(sealed) == len(data) + OVERHEAD
    assert len(data) < 4 or data not in sealed[8:]
    assert sealed != vault.seal(data, owner, place)


@given(st.binary(min_size=1, max_size=60), st.data())
def test_no_changed_byte_opens(data: bytes, draw: st.DataObject) -> None:
    vault = Vault(OLD)
    sealed = bytearray(vault.seal(data, "ctx", "0.0"))
    at = draw.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(SnapshotCorrupt):
        vault.unseal(bytes(sealed), "ctx", "0.0")


def test_pieces_cannot_change_places_and_secrets_can_be_changed() -> None:
    sealed = Vault(OLD).seal(b"entries", "ctx", "0.0")
    for owner, place in (("ctx", "0.1"), ("other", "0.0")):
        with pytest.raises(SnapshotCorrupt, match="other PRECIS_ENCRYPTION_KEYS"):
            Vault(OLD).unseal(sealed, owner, place)
    assert Vault(f"{NEW}, {OLD}").unseal(sealed, "ctx", "0.0") == b"entries"
    with pytest.raises(SnapshotCorrupt):
        Vault(NEW).unseal(sealed, "ctx", "0.0")


def test_neither_plain_nor_sealed_bytes_are_taken_for_the_other() -> None:
    sealed = Vault(OLD).seal(b"entries", "ctx", "0.0")
    with pytest.raises(SnapshotCorrupt):
        Vault().unseal(sealed, "ctx", "0.0")
    for plain in (b"", b"entries", b"\x01\x00\x00\x00" * 20):
        assert Vault().unseal(Vault().seal(plain, "ctx", "tokens"), "ctx", "tokens") == plain
        with pytest.raises(SnapshotCorrupt):
            Vault(OLD).unseal(plain, "ctx", "tokens")


def test_short_secrets_stop_the_start() -> None:
    with pytest.raises(SystemExit, match="at least 32 characters"):
        Vault("short")

"""Encryption at rest: what is stored of documents and conversations, under keys from the settings.

AES-256-GCM under a key of its own for each context or session, derived from the secret and its id; where a piece lies
is authenticated with it, so that pieces can be neither changed nor exchanged. Layout: a mark of 8 bytes that nothing
plain begins with, 12 bytes of nonce, ciphertext, 16 bytes of tag. Without a secret everything is stored as it is.
"""

from __future__ import annotations

import hashlib
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from precis.errors import SnapshotCorrupt

SHORTEST_SECRET = 32
_MARK, _NONCE, _TAG = b"\xc1precis\x01", 12, 16
OVERHEAD = len(_MARK) + _NONCE + _TAG  # bytes per piece


class Vault:
    """Seals and unseals pieces. The first secret seals; all of them open, so that secrets can be changed."""

    def __init__(self, given: str = "") -> None:
        """`given` are secrets separated by commas; empty: nothing is encrypted.

        Raises:
            SystemExit: if one is too short.
        """
        found = [each.strip() for each in given.split(",") if each.strip()]
        if any(len(secret) < SHORTEST_SECRET for secret in found):
            raise SystemExit(
                f"each secret in PRECIS_ENCRYPTION_KEYS needs at least {SHORTEST_SECRET} characters: "
                "make one with `openssl rand -base64 32`"
            )
        self._secrets = [hashlib.sha256(secret.encode()).digest() for secret in found]

    def seal(self, data: bytes, owner: str, place: str) -> bytes:
        """What to store.

        Args:
            data: plain.
            owner: id of the context, session or response that it is of.
            place: what it is there.
        """
        if not self._secrets:
            return data
        nonce = secrets.token_bytes(_NONCE)
        return _MARK + nonce + _cipher(self._secrets[0], owner).encrypt(nonce, data, place.encode())

    def unseal(self, stored: bytes, owner: str, place: str) -> bytes:
        """What was sealed.

        Raises:
            SnapshotCorrupt: if it was changed, moved, or sealed under a secret that is not known.
        """
        marked = stored.startswith(_MARK)
        if not self._secrets and not marked:
            return stored
        if marked and len(stored) >= OVERHEAD:
            nonce, sealed = stored[len(_MARK) : len(_MARK) + _NONCE], stored[len(_MARK) + _NONCE :]
            for secret in self._secrets:
                try:
                    return _cipher(secret, owner).decrypt(nonce, sealed, place.encode())
                except InvalidTag:
                    continue
        raise SnapshotCorrupt(
            f"what is stored of {owner} cannot be opened: it was changed, or sealed under other PRECIS_ENCRYPTION_KEYS"
        )


def _cipher(secret: bytes, owner: str) -> AESGCM:
    return AESGCM(hashlib.blake2b(owner.encode(), key=secret, digest_size=32).digest())

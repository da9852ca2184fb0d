"""Identity of a stored thing: SHA-256 over tagged, length-prefixed fields, equal in every process and on every run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

FORMAT_VERSION = 5  # of the snapshot container; a snapshot of another version is never read


def digest(**fields: str | bytes | int) -> str:
    """Hex SHA-256 over the fields, in order of name; no two different field tuples give one digest."""
    sha = hashlib.sha256()
    for name in sorted(fields):
        value = fields[name]
        data = value if isinstance(value, bytes) else str(value).encode()
        tag = f"{name}:{type(value).__name__}".encode()
        sha.update(len(tag).to_bytes(8, "little") + tag + len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()


def of_context(model_digest: str, token_ids: bytes, policy: Mapping[str, str | int | float]) -> str:
    """Fingerprint of a snapshot: of which model, of which tokens, made how.

    Args:
        model_digest: from the worker that loaded the weights (weights, config, tokenizer, dtype).
        token_ids: the context's tokens as little-endian int32.
        policy: the policy's resolved parameters.
    """
    parameters = "".join(f"{len(k)}:{k}={len(str(v))}:{v}" for k, v in sorted(policy.items()))
    return digest(model=model_digest, tokens=token_ids, policy=parameters, format=FORMAT_VERSION)

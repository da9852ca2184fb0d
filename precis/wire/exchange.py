"""The file that a context is exported to and imported from: its record, its tokens and its snapshot, in frames.

Layout: 8 bytes `PRECIS\\0\\1`; then frames of `<HQ` lengths of name and data, name, data; the last has no name, and the
SHA-256 of everything before it as data. Names: `head`, an `Exported` in JSON; `tokens`, little-endian int32;
`retention`; and `PART/FIELD` for each field of the snapshot, as `precis.wire.keys.snapshot` has them.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from precis.errors import InvalidRequest
from precis.wire.presets import Compression
from precis.wire.records import FidelityRecord, Source

MAGIC = b"PRECIS\x00\x01"
MAX_FRAME = 64 << 20  # bytes of data
_LENGTHS = struct.Struct("<HQ")
_MAX_NAME = 64


class Exported(msgspec.Struct, frozen=True):
    """What is told of an exported context; the fields are those of its record."""

    model: str
    tokenizer_digest: str
    fingerprint: str
    compression: Compression
    template: str
    roles: list[str]
    body: tuple[int, int]
    n_tokens: int
    name: str = ""
    metadata: dict[str, str] = {}
    beginning: str = ""
    fidelity: FidelityRecord | None = None
    source: Source | None = None


class Writer:
    """Makes the bytes of a file."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def begin(self) -> bytes:
        """What comes first."""
        return self._counted(MAGIC)

    def frame(self, name: str, data: bytes) -> bytes:
        """A frame."""
        return self._counted(_LENGTHS.pack(len(name), len(data)) + name.encode() + data)

    def end(self) -> bytes:
        """What comes last."""
        return _LENGTHS.pack(0, hashlib.sha256().digest_size) + self._sha.digest()

    def _counted(self, data: bytes) -> bytes:
        self._sha.update(data)
        return data


class Reader:
    """Takes a file apart while it comes in."""

    def __init__(self) -> None:
        self._held, self._sha = bytearray(), hashlib.sha256()
        self._begun = self._ended = False

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        """The frames that these bytes complete.

        Raises:
            InvalidRequest: if they cannot be of such a file, or are not those that were written.
        """
        self._held += data
        found: list[tuple[str, bytes]] = []
        if not self._begun:
            if not MAGIC.startswith(bytes(self._held[: len(MAGIC)])):
                raise InvalidRequest("this is no exported context, or one of another version of the format")
            if len(self._held) < len(MAGIC):
                return found
            self._begun = True
            self._taken(len(MAGIC))
        while (frame := self._frame()) is not None:
            found.append(frame)
        return found

    def finish(self) -> None:
        """No more bytes come.

        Raises:
            InvalidRequest: if the file is not complete.
        """
        if not self._ended or self._held:
            raise InvalidRequest("the exported context is cut off, or has bytes after its end")

    def _frame(self) -> tuple[str, bytes] | None:
        if self._ended or len(self._held) < _LENGTHS.size:
            return None
        n_name, n_data = _LENGTHS.unpack_from(self._held)
        if n_name > _MAX_NAME or n_data > MAX_FRAME:
            raise InvalidRequest("the exported context is damaged: a length is out of bounds")
        start = _LENGTHS.size + n_name
        if len(self._held) < start + n_data:
            return None
        if not n_name:
            if bytes(self._held[start : start + n_data]) != self._sha.digest():
                raise InvalidRequest("the exported context is damaged: its checksum does not fit")
            self._ended = True
            del self._held[: start + n_data]
            return None
        taken = self._taken(start + n_data)
        try:
            return taken[_LENGTHS.size : start].decode("ascii"), taken[start:]
        except UnicodeDecodeError as error:
            raise InvalidRequest("the exported context is damaged: a name cannot be read") from error

    def _taken(self, n: int) -> bytes:
        taken = bytes(self._held[:n])
        del self._held[:n]
        self._sha.update(taken)
        return taken

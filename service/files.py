"""An uploaded file becomes text. What it is, its first bytes say; PDF, DOCX and HTML are read by a bounded process."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import zipfile
from dataclasses import dataclass
from io import BytesIO

from precis.errors import UnreadableFile, UnsupportedFile

_MEMORY, _SECONDS = 2 << 30, 60  # of the process that reads a file
_AT_ONCE = 2
_SNIFFED = 4096
_KNOWN = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x1f\x8b": "a gzip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\xd0\xcf\x11\xe0": "an old or encrypted Office file",
    b"{\\rtf": "an RTF file",
    b"\x7fELF": "a program",
    b"SQLite format 3": "a database",
}
_TAKEN = "PDF, DOCX, HTML, Markdown and plain text are read"
_reading = asyncio.Semaphore(_AT_ONCE)


@dataclass(frozen=True, slots=True)
class Extracted:
    """The text of a file.

    Attributes:
        kind: "text", "pdf", "docx" or "html".
        page_starts: where each page begins, in characters; empty for kinds without pages.
    """

    text: str
    kind: str
    page_starts: list[int]


async def extract(data: bytes, name: str = "") -> Extracted:
    """Text of a file, whatever its name says.

    Raises:
        UnsupportedFile: if it is of a kind that is not read.
        UnreadableFile: if it is damaged, encrypted, without text, or takes too much to read.
    """
    kind = kind_of(data, name)
    if kind == "text":
        return Extracted(_decoded(data), kind, [])
    async with _reading:
        pages = await _read(kind, data)
    text = "".join(pages)
    if not text.strip():
        raise UnreadableFile(f"the {kind.upper()} has no text")
    starts, at = [], 0
    for page in pages:
        starts.append(at)
        at += len(page)
    return Extracted(text, kind, starts if kind == "pdf" else [])


def kind_of(data: bytes, name: str = "") -> str:
    """What a file is, by its first bytes; its name decides only whether text is HTML.

    Raises:
        UnsupportedFile: naming what it is.
    """
    head = data[:_SNIFFED]
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        if "word/document.xml" in _members(data):
            return "docx"
        raise UnsupportedFile(f"the file is a zip archive or an Office file other than DOCX: {_TAKEN}")
    for start, what in _KNOWN.items():
        if head.startswith(start):
            raise UnsupportedFile(f"the file is {what}: {_TAKEN}")
    wide = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in head and not wide:
        raise UnsupportedFile(f"the file is not text: {_TAKEN}")
    begins = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if begins.startswith((b"<!doctype html", b"<html")) or name.lower().endswith((".html", ".htm", ".xhtml")):
        return "html"
    return "text"


def _members(data: bytes) -> list[str]:
    try:
        return zipfile.ZipFile(BytesIO(data)).namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return []


def _decoded(data: bytes) -> str:
    """UTF-8, or UTF-16 where a byte order mark says so.

    Raises:
        UnreadableFile: if it is neither.
    """
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise UnreadableFile(f"the document is not UTF-8 text: {where}. Convert it first") from error


async def _read(kind: str, data: bytes) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "service.extract",
        kind,
        str(_MEMORY),
        str(math.ceil(_SECONDS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "LANG": "C.UTF-8", "PYTHONUTF8": "1"},
    )
    try:
        async with asyncio.timeout(_SECONDS):
            out, _ = await process.communicate(data)
    except TimeoutError:
        raise UnreadableFile(f"the {kind.upper()} takes more than {_SECONDS} seconds to read") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        pages: list[str] = json.loads(out)["pages"]
        return pages
    if process.returncode == 3:
        raise UnreadableFile(json.loads(out)["error"])
    raise UnreadableFile(f"the {kind.upper()} cannot be read: it is damaged, or takes too much memory")

"""`python -m service.extract KIND BYTES SECONDS`: a file on standard input becomes text on standard output, as JSON.

Run as a process of its own, bounded in memory and time, since what it reads comes from strangers (`service.files`).
"""

from __future__ import annotations

import io
import json
import re
import resource
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import docx
import pypdfium2
from docx.opc.exceptions import PackageNotFoundError
from docx.table import Table
from selectolax.lexbor import LexborHTMLParser

_MOST_PAGES = 5000
_MOST_UNPACKED, _MOST_SHRUNK = 200 << 20, 200  # bytes of a DOCX's parts together; times that one part may be larger
_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "head", "iframe", "object", "canvas"})
_BLOCK = re.compile(
    "address|article|aside|blockquote|body|br|d[dlt]|details|div|fieldset|figcaption|figure|footer|form|h[1-6]|header|hr|"
    "li|main|nav|ol|p|pre|section|summary|table|tr|ul"
)
_SCAN = "the PDF has no text, only images: run text recognition (OCR) on it first"


class Unreadable(Exception):
    """For the caller to read."""


def read_pdf(data: bytes) -> list[str]:
    """The text of each page.

    Raises:
        Unreadable: if it is encrypted, damaged, too long, or has no text.
    """
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("the PDF is encrypted: remove its password first") from error
        raise Unreadable("the PDF is damaged and cannot be opened") from error
    if len(document) > _MOST_PAGES:
        raise Unreadable(f"the PDF has {len(document)} pages, the limit is {_MOST_PAGES}")
    pages = []
    for page in document:
        text = page.get_textpage().get_text_range()
        pages.append(text.replace("\r\n", "\n").replace("\ufffe", "").strip() + "\n")
    if not any(text.strip() for text in pages):
        raise Unreadable(_SCAN)
    return pages


def read_docx(data: bytes) -> list[str]:
    """The text as one page: paragraphs and tables in their order, headings marked as in Markdown.

    Raises:
        Unreadable: if it is damaged, or unpacks to far more than it is.
    """
    try:
        parts = zipfile.ZipFile(io.BytesIO(data)).infolist()
        if sum(part.file_size for part in parts) > _MOST_UNPACKED or any(
            part.file_size > 1 << 20 and part.file_size > _MOST_SHRUNK * max(1, part.compress_size) for part in parts
        ):
            raise Unreadable("the DOCX unpacks to far more than a document: it is not opened")
        document = docx.Document(io.BytesIO(data))
    except (zipfile.BadZipFile, PackageNotFoundError, KeyError, ValueError) as error:
        raise Unreadable("the DOCX is damaged and cannot be opened") from error
    lines = []
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            lines += [" | ".join(cell.text.replace("\n", " ") for cell in row.cells) for row in block.rows] + [""]
        else:
            level = re.fullmatch(r"Heading (\d)", block.style.name if block.style is not None else "")
            lines += [("#" * int(level[1]) + " " if level and block.text else "") + block.text, ""]
    return [re.sub(r"\n{3,}", "\n\n", "\n".join(lines))]


def read_html(data: bytes) -> list[str]:
    """The text that a reader would see, as one page."""
    root = LexborHTMLParser(data).body
    pieces = [] if root is None else list(_pieces(root))
    lines = [re.sub(r"[ \t\r\f\v]+", " ", line).strip() for line in "".join(pieces).split("\n")]
    return [re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"]


def _pieces(root: Any) -> Iterator[str]:
    """Texts in order, with line ends where blocks begin and end; no recursion, however deep the tree."""
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node
            continue
        tag = node.tag
        if tag == "-text":
            yield re.sub(r"\s+", " ", node.text_content or "")
        elif tag in ("td", "th"):
            waiting += [" | ", *reversed(list(node.iter(include_text=True)))]
        elif tag not in _SILENT:
            edge = "\n" if _BLOCK.fullmatch(tag or "") else ""
            mark = "#" * int(tag[1]) + " " if re.fullmatch(r"h[1-6]", tag or "") else "- " if tag == "li" else ""
            yield edge + edge * (tag in ("p", "table") or bool(mark.startswith("#"))) + mark
            waiting += [edge, *reversed(list(node.iter(include_text=True)))]


READERS: dict[str, Callable[[bytes], list[str]]] = {"pdf": read_pdf, "docx": read_docx, "html": read_html}


def main(kind: str, most_bytes: int, seconds: int) -> int:
    """Read, write, and the exit code: 3 for a file that cannot be read, with the reason on standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = READERS[kind](sys.stdin.buffer.read())
    except Unreadable as error:
        json.dump({"error": str(error)}, sys.stdout)
        return 3
    json.dump({"pages": pages}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

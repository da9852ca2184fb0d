"""Files of every kind become text, whatever their names say; hostile ones become an error that says what to do."""

from __future__ import annotations

import contextlib
import io
import zipfile
from typing import Any

import docx
import pypdfium2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precis.errors import PrecisError, UnreadableFile, UnsupportedFile
from service import extract as child
from service import files
from service.files import extract, kind_of
from tests.stack import Stack

EASY = '{"compression": {"policy": "snapkv", "keep_ratio": 0.5}, "template": "raw"}'


def pdf(pages: list[str]) -> bytes:
    """A small PDF by hand: one line of text per page."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{offset:010d} 00000 n \n".encode() for offset in offsets)
    return out + f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF".encode()


def word() -> bytes:
    made = docx.Document()
    made.add_heading("Minutes", 1)
    made.add_paragraph("The keeper is Marta.")
    table = made.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "ferry", "three coins"
    made.add_paragraph("After the table.")
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


async def test_a_pdf_is_read_page_by_page() -> None:
    found = await extract(pdf(["The lighthouse is green.", "", "The ferry costs three coins."]), "notes.txt")
    assert found.kind == "pdf"
    assert len(found.page_starts) == 3
    assert found.text[: found.page_starts[1]].strip() == "The lighthouse is green."
    assert found.text[found.page_starts[2] :].strip() == "The ferry costs three coins."
    long = "beyond the edge of the page " * 30
    assert (await extract(pdf([long]))).text.split() == long.split()


async def test_a_docx_is_read_in_order_with_tables_and_headings() -> None:
    found = await extract(word(), "anything.bin")
    lines = [line for line in found.text.splitlines() if line]
    assert lines == ["# Minutes", "The keeper is Marta.", "ferry | three coins", "After the table."]
    assert (found.kind, found.page_starts) == ("docx", [])


async def test_html_is_what_a_reader_would_see() -> None:
    page = """<!DOCTYPE html><html><head><title>no</title><style>p{}</style></head><body><script>steal()</script>
    <h2>Big <b>news</b></h2><p>One <i>two</i>
    three.<br>Next line.</p><ul><li>a</li><li>b <a href="x">link</a></li></ul><div><div>in</div></div></body></html>"""
    found = await extract(page.encode(), "x")
    lines = [line for line in found.text.splitlines() if line]
    assert lines == ["## Big news", "One two three.", "Next line.", "- a", "- b link", "in"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("# Über\n\ntext".encode(), "# Über\n\ntext"),
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
        ("breit é".encode("utf-16"), "breit é"),
        (b"a < b and <html> is a word", "a < b and <html> is a word"),
    ],
)
async def test_text_is_taken_as_it_is(data: bytes, text: str) -> None:
    assert (await extract(data, "notes.md")).text == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "a PNG image"),
        (b"\x1f\x8b\x08" + b"\0" * 40, "a gzip archive"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1" + b"\0" * 40, "an old or encrypted Office file"),
        (b"PK\x03\x04" + b"\0" * 40, "zip archive"),
        (b"abc\0def", "not text"),
    ],
)
async def test_other_kinds_are_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(UnsupportedFile, match=says):
        await extract(data, "looks-like.txt")


async def test_files_that_cannot_be_read_say_why() -> None:
    with pytest.raises(UnreadableFile, match="text recognition"):
        await extract(pdf(["", ""]))
    with pytest.raises(UnreadableFile, match="damaged"):
        await extract(b"%PDF-1.4\nnothing else")
    with pytest.raises(UnreadableFile, match="damaged"):
        await extract(word()[:900] + word()[1200:])
    with pytest.raises(UnreadableFile, match="no text"):
        await extract(b"<html><body><script>only()</script></body></html>")
    with pytest.raises(UnreadableFile, match="UTF-8"):
        await extract(b"caf\xe9 au lait")


async def test_an_encrypted_pdf_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(data: bytes) -> None:
        raise pypdfium2.PdfiumError("Failed to load document (PDFium: Incorrect password error).")

    monkeypatch.setattr("service.extract.pypdfium2.PdfDocument", locked)
    with pytest.raises(child.Unreadable, match="encrypted"):
        child.read_pdf(b"%PDF-1.4")


async def test_a_zip_bomb_is_not_opened() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name in ("[Content_Types].xml", "word/document.xml"):
            made.writestr(name, b" " * (40 << 20))
    assert len(out.getvalue()) < 200_000
    with pytest.raises(UnreadableFile, match="far more"):
        await extract(out.getvalue())


async def test_a_reader_that_takes_too_long_or_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = b"<html><body>" + b"<div>" * 5_000 + b"deep</body></html>"
    assert (await extract(deep)).text.strip() == "deep"
    monkeypatch.setattr(files, "_SECONDS", 0.01)
    with pytest.raises(UnreadableFile, match=r"takes more than 0.01 seconds"):
        await extract(word())
    monkeypatch.setattr(files, "_SECONDS", 60)
    monkeypatch.setattr(files, "_MEMORY", 1 << 20)
    with pytest.raises(UnreadableFile, match="memory"):
        await extract(word())


@given(data=st.binary(max_size=300), start=st.sampled_from([b"", b"%PDF-1.7\n", b"PK\x03\x04", b"<html>"]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_kind_or_refused(data: bytes, start: bytes) -> None:
    try:
        kind = kind_of(start + data, "x.txt")
    except UnsupportedFile:
        return
    assert kind in ("text", "pdf", "docx", "html")
    if kind in ("pdf", "html"):
        with contextlib.suppress(child.Unreadable):
            assert child.READERS[kind](start + data)


def test_an_upload_tells_what_the_file_was(stack: Stack) -> None:
    def put(data: bytes, name: str) -> Any:
        files = {"file": (name, data)}
        return stack.http().post("/v1/contexts?wait=60", files=files, data={"options": EASY})

    text = "The quick brown fox jumps over the lazy dog. "
    made = put(pdf([text * 2, text * 2]), "fox.pdf")
    assert made.status_code == 200, made.text
    assert made.json()["name"] == "fox.pdf"
    source = made.json()["source"]
    assert source["kind"] == "pdf"
    assert len(source["page_starts"]) == 2
    refused = put(b"\x89PNG\r\n\x1a\n\0\0", "fox.txt")
    assert (refused.status_code, refused.json()["code"]) == (415, "unsupported_file")
    empty = put(pdf([""]), "scan.pdf")
    assert (empty.status_code, empty.json()["code"]) == (422, "unreadable_file")
    assert issubclass(UnreadableFile, PrecisError)

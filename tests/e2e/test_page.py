"""The page, in a real browser without a window, against real processes with a tiny model."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.stack import ADMIN_KEY, Stack, running_server, running_stack

DOCUMENT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if not found:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """The page with nothing stored, which must log no error."""
    for context in stack.http().get("/v1/contexts").json()["data"]:
        stack.http().delete(f"/v1/contexts/{context['id']}")
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(stack.base_url)
    yield page
    assert [text for text in complaints if not re.search("ERR_FAILED|status of 4(04|22)", text)] == []
    page.close()


def upload(page: Page, text: str, name: str) -> None:
    page.get_by_text("How to compress").click()
    page.get_by_role("textbox", name="Name").fill(name)
    page.get_by_label("Snapshot").select_option(label="A quarter, chosen fast (SnapKV)")
    page.get_by_role("textbox", name="Text").fill(text)
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()


def ask(page: Page, question: str) -> None:
    field = page.get_by_role("textbox", name="Question")
    expect(field).to_be_enabled(timeout=30_000)
    field.fill(question)
    field.press("Enter")


def test_a_document_is_uploaded_asked_looked_at_and_deleted(page: Page, stack: Stack) -> None:
    expect(page.get_by_text("Nothing is stored yet")).to_be_visible()
    expect(page.get_by_text(re.compile("1 worker"))).to_be_visible()
    upload(page, DOCUMENT + "page", "My notes")
    expect(page.get_by_role("term").filter(has_text="Fidelity")).to_be_visible(timeout=30_000)
    ask(page, "Who jumps?")
    expect(
        page.get_by_text(re.compile(r"first token after .* tokens from the snapshot \(hit; memory\)"))
    ).to_be_visible(timeout=30_000)
    ask(page, "And then?")
    expect(page.locator(".told")).to_have_count(2)
    expect(page.locator(".turn.user")).to_have_text(["Who jumps?", "And then?"])
    page.get_by_role("tab", name="What was kept").click()
    document = page.get_by_role("region", name="The document's text, shaded")
    expect(document).to_contain_text(DOCUMENT[:200])
    context = stack.http().get("/v1/contexts").json()["data"][0]
    told = stack.http().get(f"/v1/contexts/{context['id']}/retention").json()
    assert document.inner_text().strip() == "".join(text for text, _ in told["tokens"]).strip() == (DOCUMENT + "page")
    shares = [
        float(share)
        for share in document.locator("span").evaluate_all("all => all.map(e => e.style.getPropertyValue('--share'))")
    ]
    assert max(shares) == 1
    assert min(shares) < 0.5
    expect(page.get_by_role("region", name="Bytes per layer and head").locator("tbody tr")).to_have_count(4)
    page.get_by_role("tab", name="Use it from code").click()
    expect(page.get_by_role("tabpanel").locator("pre").first).to_contain_text(context["id"])
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete for good").click()
    expect(page.get_by_text("Choose a document")).to_be_visible()
    expect(page.locator(".card")).to_have_count(0)
    assert stack.http().get(f"/v1/contexts/{context['id']}").status_code == 404


def test_a_file_can_be_chosen_and_a_refusal_is_shown_in_the_servers_words(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "nothing.txt"
    file.write_text("   ")
    page.get_by_label("Drop a document here").set_input_files(file)
    expect(page.get_by_text("nothing.txt")).to_be_visible()
    with page.expect_response(lambda response: response.status == 422):
        page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("the document is empty")


def test_an_answer_can_be_stopped_and_frees_its_place(page: Page, stack: Stack) -> None:
    upload(page, DOCUMENT + "stop", "Stopped")
    page.route(
        "**/queries",
        lambda route: route.continue_(
            post_data=(route.request.post_data or "").replace(
                '"max_tokens":512', '"max_tokens":30000,"ignore_eos":true'
            )
        ),
    )
    ask(page, "Tell me everything")
    expect(page.locator(".turn").nth(1)).not_to_be_empty(timeout=30_000)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".told")).to_have_text("stopped")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    expect(page.get_by_text("0 of 8 answers")).to_be_visible(timeout=15_000)


def test_a_server_that_is_away_is_said_and_its_return_is_noticed(page: Page) -> None:
    page.route("**/v1/**", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached", timeout=10_000)
    page.unroute("**/v1/**")
    expect(page.get_by_role("alert")).to_be_hidden(timeout=10_000)


def test_tabs_work_by_keyboard_and_nothing_overflows_on_a_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    upload(page, DOCUMENT + "phone", "A very long name of a document that has to be broken somewhere or other ")
    page.get_by_role("tab", name="Ask").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="What was kept")).to_be_focused()
    expect(page.get_by_role("tab", name="What was kept")).to_have_attribute("aria-selected", "true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_with_keys_the_page_asks_for_one(browser: Browser, tiny_folder: Path) -> None:
    with running_server() as server, running_stack(server, tiny_folder, PRECIS_ADMIN_KEY=ADMIN_KEY) as guarded:
        page = browser.new_page()
        page.goto(guarded.base_url)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key", exact=True).fill(ADMIN_KEY)
        dialog.get_by_role("button", name="Use it").click()
        expect(page.get_by_text("Nothing is stored yet")).to_be_visible()
        page.close()


def test_the_page_lets_nothing_in_and_serves_nothing_else(stack: Stack) -> None:
    found = httpx.get(stack.base_url)
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert httpx.head(stack.base_url).status_code == 200
    assert httpx.get(stack.base_url, headers={"if-none-match": found.headers["etag"]}).status_code == 304
    for name in ("page.py", "..%2fpage.py", "%2e%2e/app.py", ".hidden"):
        assert httpx.get(f"{stack.base_url}/static/{name}").status_code == 404
    page = (Path(__file__).parents[2] / "service" / "static" / "index.html").read_text()
    assert not re.search(r"(src|href)=\"(?!/static/|#)", page)
    assert not re.search(r" on\w+=| style=", page)

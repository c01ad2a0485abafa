"""The pages for people, as they are served."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

import fleetplane.web
from fleetplane.web import documents
from fleetplane.web.documents import Documents
from fleetplane.web.ops import Mount, OpsApp

FILES = Path(fleetplane.web.__file__).parent / "files"
SCRIPTS = sorted(path for path in FILES.iterdir() if path.suffix in (".js", ".mjs"))
PAGES = sorted(FILES.glob("*.html"))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    pages = Documents(
        {
            "/ui/instances": documents.file("instances.html", "text/html; charset=utf-8"),
            "/ui/instances/page.mjs": documents.file("instances_page.mjs", "text/javascript; charset=utf-8"),
        }
    )
    ops = OpsApp(CollectorRegistry(), version="<1>")
    ops.mount(
        [
            Mount(path="/ui/instances", app=pages, summary='live & "loud"', is_page=True),
            Mount(path="/v1/instances", app=pages, summary="REST"),
        ]
    )
    transport = httpx.ASGITransport(app=ops)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def policy(answer: httpx.Response) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in answer.headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


@pytest.mark.parametrize("path", ["/ui", "/ui/"])
async def test_the_index_leads_to_pages_and_numbers_and_escapes_what_it_says(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert re.findall(r'href="([^"]*)"', answer.text) == ["/ui/instances", "/metrics"]
    assert "Fleetplane &lt;1&gt;" in answer.text
    assert "live &amp; &quot;loud&quot;" in answer.text
    assert policy(answer)["default-src"] == "'none'"


async def test_pages_run_only_scripts_of_ours_and_nobody_frames_them(http: httpx.AsyncClient) -> None:
    answer = await http.get("/ui/instances")
    said = policy(answer)
    assert said["default-src"] == "'none'"
    assert said["script-src"] == "'self'"
    assert said["style-src"] == "'self'"
    assert said["connect-src"] == "'self'"
    assert {said["base-uri"], said["form-action"], said["frame-ancestors"]} == {"'none'"}
    assert said["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_scripts_are_served_as_scripts(http: httpx.AsyncClient) -> None:
    answer = await http.get("/ui/instances/page.mjs")
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_what_is_not_there_is_not_found(http: httpx.AsyncClient) -> None:
    answer = await http.get("/ui/instances/absent.mjs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert (await http.post("/ui/instances")).status_code == 405


class Reading(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.inline: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._in_script = tag in ("script", "style")
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag in ("script", "link", "img"):
            self.sources.append(given.get("src") or given.get("href") or "")

    def handle_data(self, data: str) -> None:
        if self._in_script and data.strip():
            self.inline.append(data)

    def handle_endtag(self, _tag: str) -> None:
        self._in_script = False


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_script_in_itself_and_none_of_others(page: Path) -> None:
    reading = Reading()
    reading.feed(page.read_text())
    assert reading.inline == []
    assert [one for one in reading.sources if not one.startswith("/") and one != "data:,"] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_out_of_text_or_keeps_tokens_longer_than_its_tab(script: Path) -> None:
    text = script.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
                 "localStorage", "document.cookie", "http://", "https://"):  # fmt: skip
        assert word not in text, word

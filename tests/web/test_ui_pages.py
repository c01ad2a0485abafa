"""The pages for people, as they are served."""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from prometheus_client import CollectorRegistry

import fleetplane.web
from fleetplane.web import documents
from fleetplane.web.documents import Documents, console_mounts, moved_to
from fleetplane.web.ops import Mount, OpsApp

FILES = Path(fleetplane.web.__file__).parent / "files"
FIRST_VIEW_BYTES = 150_000
SCRIPTS = sorted(path for path in FILES.rglob("*") if path.suffix in (".js", ".mjs"))
PAGES = sorted(FILES.rglob("*.html"))
KEEPERS = {"density.mjs": 3, "saved.mjs": 2}
"""Modules that keep names of addresses, or how close rows stand, and have nothing else to keep."""


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    pages = Documents({"/docs": documents.file("docs.html", "text/html; charset=utf-8")})
    ops = OpsApp(CollectorRegistry(), version="<1>")
    ops.mount(
        [
            Mount(path="/docs", app=pages, summary="live", is_page=True),
            Mount(path="/v1/instances", app=pages, summary="REST"),
            Mount(path="/ui/instances", app=moved_to("/ui/")),
            *console_mounts(),
        ]
    )
    transport = httpx.ASGITransport(app=ops)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def policy(answer: httpx.Response) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in answer.headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


async def test_the_index_names_pages_for_browsers_apart_from_other_paths(http: httpx.AsyncClient) -> None:
    index = (await http.get("/")).json()
    assert index["pages"] == ["/docs"]
    assert index["paths"]["/v1/instances"] == "REST"
    assert index["paths"]["/ui"] == "the console: every fleet, live"


async def test_the_index_leads_browsers_to_the_console(http: httpx.AsyncClient) -> None:
    browser = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
    led = await http.get("/", headers=browser)
    assert (led.status_code, led.headers["location"], led.headers["vary"]) == (302, "/ui/", "accept")
    assert (await http.get("/", headers=browser, follow_redirects=True)).url.path == "/ui/"


@pytest.mark.parametrize("path", ["/ui", "/ui/"])
async def test_the_console_and_every_module_that_it_imports_are_served(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.get(path)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"  # files of two versions do not mix
    (first,) = re.findall(r'<script type="module" src="([^"]*)"', answer.text)
    (other,) = re.findall(r'<script type="module" src="([^"]*)"', (await http.get("/ui/device")).text)
    wanted, served = [first, other], set[str]()
    while wanted:
        script = wanted.pop()
        found = await http.get(script)
        assert (found.status_code, found.headers["content-type"]) == (
            200,
            "text/javascript; charset=utf-8",
        ), script
        served.add(script)
        wanted += {urljoin(script, one) for one in re.findall(r'from "(\.[^"]*)"', found.text)} - served
    ours = FILES / "console"
    files = {f"/ui/console/{one.relative_to(ours)}" for one in ours.rglob("*.mjs")}
    assert files | {"/ui/live.mjs"} == served
    weight = sum(len(gzip.compress(one.read_bytes())) for one in [*ours.rglob("*.*"), FILES / "live.mjs"])
    assert weight < FIRST_VIEW_BYTES  # and it is all that a first view loads
    assert (await http.get("/ui/console/console.css")).headers["content-type"] == "text/css; charset=utf-8"


async def test_a_library_is_served_where_the_build_brought_it_in_and_otherwise_told_to_be_missing(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files" / "libraries").mkdir(parents=True)
    monkeypatch.setattr(documents, "files", lambda _package: tmp_path)
    path = "/ui/libraries/uPlot.esm.js"
    for method in ("GET", "HEAD"):
        assert (await http.request(method, path)).status_code == 404
    said = (await http.get(path)).json()["error"]
    assert (said["code"], said["message"]) == (
        "NOT_FOUND",
        "this server was built without libraries/uPlot.esm.js",
    )
    (tmp_path / "files" / "libraries" / "uPlot.esm.js").write_text("export default 1;\n")
    answer = await http.get(path)  # of a server that goes on
    assert (answer.status_code, answer.text) == (200, "export default 1;\n")
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert policy(answer)["script-src"] == "'self'"


async def test_files_are_packed_for_those_who_can_unpack_them_and_not_sent_twice(
    http: httpx.AsyncClient,
) -> None:
    path = "/ui/console/model.mjs"
    plain = await http.get(path, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    for accepted, is_packed in (
        ("br, gzip", True),
        ("gzip;q=0.5", True),
        ("gzip;q=0", False),
        ("xgzip", False),
    ):
        answer = await http.get(path, headers={"accept-encoding": accepted})
        assert (answer.headers.get("content-encoding") == "gzip") is is_packed, accepted
        assert answer.content == plain.content
        assert answer.headers["vary"] == "accept-encoding"
    assert int((await http.get(path)).headers["content-length"]) < len(plain.content) / 2
    again = await http.get(path, headers={"if-none-match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    changed = await http.get(path, headers={"if-none-match": '"another"'})
    assert changed.status_code == 200


async def test_pages_run_only_scripts_of_ours_and_nobody_frames_them(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs")
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
    answer = await http.get("/ui/console/main.mjs")
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_what_is_not_there_is_not_found(http: httpx.AsyncClient) -> None:
    answer = await http.get("/ui/console/absent.mjs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert (await http.post("/ui/")).status_code == 405


@pytest.mark.parametrize("path", ["/ui/instances", "/ui/instances/page.mjs"])
async def test_a_page_that_was_moved_leads_to_the_one_in_its_place(
    http: httpx.AsyncClient, path: str
) -> None:
    answer = await http.get(path)
    assert (answer.status_code, answer.headers["location"]) == (308, "/ui/")


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
    if script.parent.name == "libraries":  # of others, who say in comments where they learned things
        text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("//", "*")))
    if script.name in KEEPERS:
        assert text.count("localStorage.") == KEEPERS[script.name]
        assert "api.mjs" not in text
        text = text.replace("localStorage.", "")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "localStorage",
        "document.cookie",
        "http://",
        "https://",
    ):
        assert word not in text, word

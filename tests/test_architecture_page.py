"""The pages about the code agree with the tree."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fleetplane"
DOMAINS = ("boards", "edge", "gpus", "instances", "proxies")
ARCHITECTURE = sorted((ROOT / "docs" / "architecture").rglob("*.md"))
PAGES = [
    *ARCHITECTURE,
    *(SOURCE / "domains" / domain / "README.md" for domain in DOMAINS),
    ROOT / "CONTRIBUTING.md",
]
ENDINGS = ("py", "md", "mjs", "proto", "svg", "toml", "json", "txt", "sh")
FILES_LIMIT = 20
"""About fifteen; `kernel` and `rpc` hold what could be two folders."""
WORDS_LIMIT = 7000
WIDTH_LIMIT = 120


@cache
def modules() -> tuple[str, ...]:
    """Walk without failing on folders that come and go, as those of compiled files do."""
    return tuple(
        str((Path(folder) / name).relative_to(SOURCE))
        for folder, _, names in os.walk(SOURCE)
        for name in names
        if name.endswith(".py")
    )


def paths_in(text: str) -> set[str]:
    """Return the files and folders that a page names in code spans."""
    spans = re.findall(r"`([\w.<>/-]+)`", text)
    return {one for one in spans if re.search(rf"^[\w.<].*(?:/|\.(?:{'|'.join(ENDINGS)}))$", one)}


def exists(path: str) -> bool:
    """Look from the root, from the source, and in the domains: `<d>` stands for one of them."""
    in_domain = path.removeprefix("domains/<d>/")
    return (
        (ROOT / path).exists()
        or (SOURCE / path).exists()
        or any((SOURCE / "domains" / domain / in_domain).exists() for domain in DOMAINS)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert sorted(path for path in paths_in(text) if not exists(path)) == []
    links = re.findall(r"\]\(([^):#]+)(?:#[\w-]+)?\)", text)
    assert sorted(link for link in links if not (page.parent / link).exists()) == []


def test_a_file_that_is_not_there_is_found() -> None:
    named = paths_in("`kernel/store/` and `domains/<d>/nowhere.py`, `cli/` but not `/apis/v1` or `Gpu.name`")
    assert named == {"kernel/store/", "cli/", "domains/<d>/nowhere.py"}
    assert {path for path in named if not exists(path)} == {"domains/<d>/nowhere.py"}


def test_the_pages_stay_short_and_can_be_read_in_a_terminal() -> None:
    assert sum(len(page.read_text().split()) for page in ARCHITECTURE) <= WORDS_LIMIT
    too_wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > WIDTH_LIMIT and not line.startswith("|")
    ]
    assert too_wide == []


def test_the_overview_names_every_folder_of_the_source() -> None:
    overview = (ROOT / "docs" / "architecture" / "README.md").read_text()
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders - {path.split("/")[0] for path in paths_in(overview)} == set()


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_has_the_parts_that_every_domain_has(domain: str) -> None:
    folder = SOURCE / "domains" / domain
    assert all((folder / name).exists() for name in ("domain.py", "settings.py", "agent/root.py"))
    assert all((folder / name).is_dir() for name in ("grpc", "cli", "agent"))


def test_no_folder_of_a_domain_holds_more_than_can_be_taken_in_at_a_glance() -> None:
    counts = Counter(str(Path(name).parent) for name in modules() if Path(name).parts[0] != "gen")
    assert {name: count for name, count in counts.items() if count > FILES_LIMIT and name != "rpc"} == {}

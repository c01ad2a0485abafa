"""Every setting that a page names is one that a server takes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetplane import settings
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import is_secret_file

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EXAMPLE_DOMAIN = "lamps"
"""Of the page about adding a domain: it is not installed."""
DOTTED = r"[a-z_]+(?:\.[a-z_-]+)+"
NOT_SETTINGS = re.compile(r".*\.(?:run\.started|run\.ended|viewer|owner|py)")
"""Events and roles whose names the source puts together, and files."""
KNOWN = dict(settings.known_keys())
SECTIONS = {key.partition(".")[0] for key in KNOWN}


def literals() -> frozenset[str]:
    """What the source names with dots: events, roles, actions, which pages name, too."""
    files = (one for one in (ROOT / "src").rglob("*.py") if "gen" not in one.parts)
    return frozenset(name for one in files for name in re.findall(f"[\"'`]({DOTTED})[\"'`]", one.read_text()))


def in_tables(prose: str) -> Iterator[str]:
    """First cells of tables headed by `Setting`, or by a section in brackets."""
    for header, rows in re.findall(r"^\| ([^|]*) \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", prose, flags=re.MULTILINE):
        section = re.fullmatch(r"`\[([a-z_.-]+)\]`", header)
        if header == "Setting" or section:
            for row in rows.splitlines():
                names = re.findall(r"`([a-z_.-]+)`", row.split("|")[1])
                yield from (f"{section[1]}.{name}" if section else name for name in names)


def named(text: str, others: frozenset[str]) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from in_tables(prose)
    yield from re.findall(r"--set ([a-z_.-]+)=", text)
    for code in re.findall(r"`([^`\n]+)`", prose):
        found = re.fullmatch(rf"({DOTTED})( ?=.*)?", code)
        if found and found[1].partition(".")[0] in SECTIONS and (found[2] or found[1] not in others):
            yield found[1]


@pytest.fixture(scope="module")
def others() -> frozenset[str]:
    return literals() - KNOWN.keys()


def test_what_is_looked_for_is_found(others: frozenset[str]) -> None:
    page = (
        "| `[edge]` | |\n|---|---|\n| `role`, `wrong` | |\n\n`edge.connected` `edge.worse` `--set log.bad=1`"
    )
    assert [one for one in named(page, others) if one not in KNOWN] == ["edge.wrong", "log.bad", "edge.worse"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_of_a_page_is_known(page: Path, others: frozenset[str], tmp_path: Path) -> None:
    text = page.read_text()
    unknown = {one for one in named(text, others) if one not in KNOWN and not NOT_SETTINGS.fullmatch(one)}
    assert {one for one in unknown if one.partition(".")[0] in SECTIONS} == set()
    for variable in set(re.findall(r"\bFLEETPLANE_[A-Z0-9_]+", text)):
        if EXAMPLE_DOMAIN.upper() not in variable:
            settings._from_environment({variable: "1"})
    for printed in re.findall(r"^```toml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        block, given = printed, dict(settings._flatten(tomllib.loads(printed)))
        if {key.partition(".")[0] for key in given} <= SECTIONS:
            for name in [key for key in given if KNOWN.get(key) and is_secret_file(KNOWN[key])]:
                path = Path(str(given[name]))
                if path.is_absolute():  # its content is the installation's own
                    (tmp_path / path.name).write_text("secret")
                    block = block.replace(str(path), str(tmp_path / path.name))
            (tmp_path / "fleetplane.toml").write_text(block)
            try:
                settings.load(config=tmp_path / "fleetplane.toml", environment={})
            except SettingsError as error:
                raise AssertionError(f"{page.name}: {error.message}:\n{block}") from error

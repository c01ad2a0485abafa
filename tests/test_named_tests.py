"""What the documentation says finds a fault is there to find it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from long_first import LONG

ROOT = Path(__file__).parent.parent
PAGES = ("track-record.md", "security.md")


@cache
def known() -> tuple[frozenset[str], frozenset[str]]:
    """Names of every test function, and of every test file."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = {
        name
        for path in files
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    return frozenset(functions), frozenset(path.name for path in files)


def named(page: str) -> list[str]:
    return sorted(set(re.findall(r"`(?:[\w/]+/)?(test_\w+(?:\.py|…)?)", (ROOT / "docs" / page).read_text())))


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    functions, files = known()
    absent = [
        name
        for name in named(page)
        if name not in functions
        and name not in files
        and f"{name}.py" not in files
        and not (name.endswith("…") and any(one.startswith(name[:-1]) for one in functions))
    ]
    assert len(named(page)) > 50
    assert absent == []


@pytest.mark.parametrize("name", LONG)
def test_every_test_that_begins_first_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert f"def {function or 'test_'}" in (ROOT / path).read_text()

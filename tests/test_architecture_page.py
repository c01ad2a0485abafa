"""What the page about the architecture says of the tree is so."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fleetplane"
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
FILES_LIMIT = 20
"""About fifteen; `kernel` and `rpc` hold what could be two rooms."""


@cache
def modules() -> tuple[str, ...]:
    """By a walk that does not mind folders that come and go beside it, as those of compiled files do."""
    return tuple(
        str((Path(folder) / name).relative_to(SOURCE))
        for folder, _, names in os.walk(SOURCE)
        for name in names
        if name.endswith(".py")
    )


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE))))
def test_every_file_that_the_page_names_exists(name: str) -> None:
    if name.startswith(("tests/", "docs/", "tools/")):
        assert (ROOT / name).exists()
    else:
        assert [path for path in modules() if path == name or path.endswith(f"/{name}")]


def test_every_folder_of_the_picture_exists_and_none_is_missing_from_it() -> None:
    picture = re.search(r"^```text\n(cli/.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert picture is not None
    named = set(re.findall(r"^([a-z_]+)(?:/|\.py)\s", picture.group(1), re.MULTILINE))
    there = {
        path.stem for path in SOURCE.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert named <= there
    assert {path.name for path in SOURCE.iterdir() if path.is_dir()} - {"__pycache__"} <= named


@pytest.mark.parametrize("domain", ["gpus", "instances", "proxies", "boards", "edge"])
def test_every_domain_has_a_section_and_the_rooms_that_every_domain_has(domain: str) -> None:
    heading = {"gpus": "GPUs"}.get(domain, domain.capitalize())
    assert f"\n## {heading}\n" in PAGE
    folder = SOURCE / "domains" / domain
    assert all((folder / f"{name}.py").exists() for name in ("domain", "settings", "server"))
    assert all((folder / name).is_dir() for name in ("grpc", "cli", "agent"))
    assert (folder / "agent" / "root.py").exists()


def test_no_folder_of_a_domain_holds_more_than_can_be_taken_in_at_a_glance() -> None:
    counts = Counter(str(Path(name).parent) for name in modules() if Path(name).parts[0] != "gen")
    assert {name: count for name, count in counts.items() if count > FILES_LIMIT and name != "rpc"} == {}

"""The requests of docs/plans.md, sent as printed and in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from support.fleet.plans_rig import plans_rig

PAGE = Path(__file__).parents[3] / "docs" / "plans.md"
BLOCK = re.compile(r"^```(http|json)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def contains(found: Any, told: Any) -> bool:
    """Whether what was answered says at least what the page tells."""
    if isinstance(told, dict):
        return isinstance(found, dict) and all(contains(found.get(key), told[key]) for key in told)
    if isinstance(told, list):
        return len(found) == len(told) and all(map(contains, found, told))
    return bool(found == told)


async def test_the_requests_of_the_page_work_as_printed(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) > 10
    answer: Any = None
    plan = ""
    async with plans_rig(tmp_path) as rig:
        for kind, text in blocks:
            if kind == "json":
                assert contains(answer.json(), msgspec.json.decode(text)), answer.text
                continue
            head, _, body = text.partition("\n\n")
            line, *given = head.strip().splitlines()
            method, path = line.split(" ", 1)
            answer = await rig.call(
                method,
                path.removeprefix("/apis/v1").replace("/ID", f"/{plan}"),
                msgspec.json.decode(body) if body.strip() else None,
                headers=dict(one.split(": ", 1) for one in given),
            )
            assert answer.is_success, (line, answer.text)
            if method == "POST" and path.endswith("/plans"):
                plan = answer.json()["id"]

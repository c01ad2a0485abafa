"""Numbers in requests: what is beyond their bounds stays beyond them however it is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.boards.boards_rig import boards_rig
from support.boards.boards_web import BoardsWeb, boards_web


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[BoardsWeb]:
    async with boards_rig(tmp_path) as rig, boards_web(rig) as web:
        yield web


async def test_zeros_before_a_number_do_not_lift_its_bounds(web: BoardsWeb) -> None:
    assert (await web.get("/nodes?limit=0000000000000000050"))["limit"] == 50
    for hidden in ("0000000010009999", "0" * 12 + "1001", "0" * 12 + "9" * 4400):
        assert await web.refused("GET", f"/nodes?limit={hidden}") == 400, hidden
        assert await web.refused("GET", f"/runs?limit={hidden}") == 400, hidden
    assert await web.refused("GET", f"/nodes/{'0' * 11}{'9' * 4400}") == 400

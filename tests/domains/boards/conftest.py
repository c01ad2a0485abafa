"""A server for boards, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from boards_rig import BoardsRig, boards_rig
from boards_web import BoardsWeb, boards_web


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path) as made:
        yield made


@pytest.fixture
async def web(rig: BoardsRig) -> AsyncIterator[BoardsWeb]:
    async with boards_web(rig) as made:
        yield made

"""Answers of the proxies family are the same bytes as those that were recorded."""

from __future__ import annotations

from pathlib import Path

from support.proxies.proxy_api import rest_api
from support.shared.recorded_answers import differences

RECORDED = Path(__file__).parent / "recorded" / "answers.tsv"


async def test_every_shape_writes_the_bytes_that_were_recorded(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        assert differences(RECORDED, api.rest.table.routes) == []

"""Answers of the boards family are the same bytes as before they had types."""

from __future__ import annotations

from pathlib import Path

from support.boards.boards_web import BoardsWeb
from support.shared.recorded_answers import differences, not_recorded

from fleetplane.domains.boards.rest.shapes.telemetry import OriginalData

RECORDED = Path(__file__).parent / "recorded" / "answers.tsv"
ORIGINAL = "GET /nodes/{id}/system of an original agent"
NEVER = {"POST /ca/certificates"}
"""Always refused."""
ALIKE = {
    "GET /ca/certificates/{id}",
    "POST /nodes/{id}/deprovision",
    "POST /clusters/{id}/deprovision",
    "POST /clusters/{id}/scale",
}
"""Made by the same function as one that is recorded."""


async def test_every_shape_writes_the_bytes_that_were_recorded(web: BoardsWeb) -> None:
    routes = web.rig.domain.rest.table.routes
    assert differences(RECORDED, routes, further={ORIGINAL: OriginalData}) == []


async def test_every_answer_is_recorded(web: BoardsWeb) -> None:
    """But of routes that are younger than the recording."""
    routes = [one for one in web.rig.domain.rest.table.routes if "/runs" not in one.path]
    assert not_recorded(RECORDED, routes) == NEVER | ALIKE

"""Answers of the instances family are the same bytes as those that were recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.shared.recorded_answers import differences

from fleetplane.domains.instances.rest.routes import ViewRoutes

RECORDED = Path(__file__).parent / "recorded" / "answers.tsv"


def test_every_shape_writes_the_bytes_that_were_recorded() -> None:
    none: Any = None
    routes = ViewRoutes(overview=none, errors=none, gate=none).routes()
    assert differences(RECORDED, routes) == []

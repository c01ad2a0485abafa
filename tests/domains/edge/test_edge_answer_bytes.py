"""Answers of the edge family are the same bytes as before they had types."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.shared.recorded_answers import differences, not_recorded

from fleetplane.domains.edge.rest.cluster import ClusterRoutes, ConfigRoutes
from fleetplane.domains.edge.rest.common import Manner
from fleetplane.domains.edge.rest.hosts import GroupRoutes, HostRoutes
from fleetplane.domains.edge.rest.runs import FleetRoutes
from fleetplane.web.rest.routes import Route

RECORDED = Path(__file__).parent / "recorded" / "answers.tsv"
NEW: set[str] = set()
"""Routes that are younger than the recording."""


def routes() -> Sequence[Route]:
    """The rows alone: nothing of what handlers work with is touched."""
    none: Any = None
    manner = Manner(shipped=False)
    return (
        *HostRoutes(none, nodes=none, enrollments=none, runs=none, heard_at_ns=none, manner=manner).routes(),
        *GroupRoutes(groups=none, nodes=none, manner=manner).routes(),
        *FleetRoutes(runs=none, node=none, manner=manner, deadline_seconds=1).routes(),
        *ConfigRoutes(layers=none, nodes=none, may_write=none).routes(),
        *ClusterRoutes(none, workers=none, admission=none, layers=none, nodes=none).routes(),
    )


def test_every_shape_writes_the_bytes_that_were_recorded() -> None:
    assert differences(RECORDED, routes()) == []


def test_every_answer_is_recorded() -> None:
    assert not_recorded(RECORDED, routes()) == NEW

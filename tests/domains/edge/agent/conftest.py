"""A server for daemons to talk to, and quiet logs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.edge.edge_server_double import EdgeServerDouble, edge_server


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """The log's state is the process's; each test gets its own, and says nothing."""
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()


def _drop(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EdgeServerDouble]:
    async with edge_server(tmp_path / "server") as double:
        yield double

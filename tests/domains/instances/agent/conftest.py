"""A machine with the folders of an agent, and a server for it to talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from domains.instances.agent.agent_rig import Rig
from support.instances.instance_server_double import InstanceServerDouble, instance_server


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """The log's state is the process's; each test gets its own, and says nothing."""
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()


def _drop(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[InstanceServerDouble]:
    async with instance_server(tmp_path / "server") as double:
        yield double


@pytest.fixture
def rig(tmp_path: Path, server: InstanceServerDouble) -> Rig:
    return Rig(tmp_path, server)

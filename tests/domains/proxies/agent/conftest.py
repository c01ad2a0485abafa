"""A folder for an NGINX, and a server for its agent to talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from support.proxies.nginx_rig import Rig, state_folder
from support.proxies.proxy_server_double import ProxyServerDouble, proxy_server


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """The log's state is the process's; each test gets its own, and says nothing."""
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()


def _drop(logger: Any, name: str, event: Any) -> Any:
    raise structlog.DropEvent


@pytest.fixture
def folder() -> Iterator[Path]:
    with state_folder() as made:
        yield made


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ProxyServerDouble]:
    async with proxy_server(tmp_path / "server") as double:
        yield double

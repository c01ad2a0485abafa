"""Servers to call, one per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import structlog
import uvloop
from support.rpc.targets import KINDS, Certificates, Target, make_certificates, open_target


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The product's own event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Thousands of calls are ended on purpose here; tests that care capture the events."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=KINDS)
async def target(
    request: pytest.FixtureRequest, tmp_path: Path, certificates: Certificates
) -> AsyncIterator[Target]:
    async with open_target(request.param, tmp_path, certificates) as opened:
        yield opened

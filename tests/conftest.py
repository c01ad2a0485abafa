"""What holds for every test."""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import asyncio.streams
import gc
import os
import runpy
import signal
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx._config
import hypothesis
import long_first
import pytest
import websockets.asyncio.client
import websockets.sync.client
from _pytest.unraisableexception import collect_unraisable
from argon2 import PasswordHasher
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis.internal.conjecture import providers
from quick_selection import is_quick
from support.shared.postgres_server import PostgresServer, running
from support.shared.ready_keys import ReadyKeys
from support.shared.run_twice import run_twice
from support.shared.telemetry_place import TelemetryPlace

from fleetplane.kernel.identity import passwords
from fleetplane.kernel.stalls import Watchdog

# Programs that tests start find the helpers that they share with tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
)

# Tests run what the contracts say now: whoever took over somebody else's contract has no module of it yet.
_ROOT = Path(__file__).parents[1]
_MADE = _ROOT / "src" / "fleetplane" / "gen" / "__init__.py"
_MADE_AT = _MADE.stat().st_mtime if _MADE.exists() else 0.0
if "PYTEST_XDIST_WORKER" not in os.environ and any(
    one.stat().st_mtime > _MADE_AT for one in (_ROOT / "proto").rglob("*.proto")
):
    runpy.run_path(str(_ROOT / "tools" / "protogen.py"))["generate"](_ROOT)

# Nobody's own contexts: a test must not reach the servers that whoever runs it has logged in to.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / f"fleetplane-tests-config-{os.getuid()}")

# A shell that starts us in the background has us ignore Ctrl-C, and so would every program that a test
# starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an answer takes says something about the machine: who waits for one waits as for all else.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)
for _connect in (websockets.asyncio.client.connect.__init__, websockets.sync.client.connect):
    _defaults = _connect.__kwdefaults__
    assert _defaults is not None
    assert {"open_timeout", "ping_timeout"} <= _defaults.keys()
    _defaults.update(open_timeout=60.0, ping_timeout=60.0)

# And so does how long one example takes. Examples are the same every time, so that what passed passes again;
# whoever looks for new ones says so.
EXPLORING = os.environ.get("HYPOTHESIS_EXPLORE") == "1"
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=not EXPLORING,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")
if not EXPLORING:
    # Else constants of our modules are tried as well: of those that this process has imported by then, which
    # depends on what it was given to run before.
    providers.is_local_module_file = lambda _: False  # type: ignore[attr-defined, assignment]

_close = asyncio.selector_events.BaseSelectorEventLoop.close


def _close_with_visitors(loop: asyncio.selector_events.BaseSelectorEventLoop) -> None:
    """Let go of accepted connections when the loop ends, as the end of a process would.

    A visitor may come in the loop's last turn: the handler of `start_server` is cancelled before its first
    step then and closes nothing, and nobody else has the connection.
    """
    visitors = [
        transport
        for transport in list(loop._transports.values())  # type: ignore[attr-defined]
        if isinstance(protocol := transport.get_protocol(), asyncio.streams.StreamReaderProtocol)
        and protocol._client_connected_cb is not None  # type: ignore[attr-defined]
    ]
    if visitors and not loop.is_closed() and not loop.is_running():
        for transport in visitors:
            transport.abort()
        loop.run_until_complete(asyncio.sleep(0))
    _close(loop)


asyncio.selector_events.BaseSelectorEventLoop.close = _close_with_visitors  # type: ignore[assignment, method-assign]

_accept = asyncio.selector_events.BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]


async def _accept_unless_closed(
    loop: asyncio.selector_events.BaseSelectorEventLoop,
    protocol_factory: Any,
    conn: socket.socket,
    extra: Any,
    sslcontext: Any = None,
    server: asyncio.Server | None = None,
    *more: Any,
) -> None:
    """Turn away who was accepted in the very turn in which the server was closed: Python forgets to."""
    if server is not None and not server.sockets:
        conn.close()
        return
    await _accept(loop, protocol_factory, conn, extra, sslcontext, server, *more)


asyncio.selector_events.BaseSelectorEventLoop._accept_connection2 = _accept_unless_closed  # type: ignore[attr-defined]

NOBODYS = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(os.urandom(32))
RSA_KEYS = ReadyKeys()
TESTS = Path(__file__).parent
RUN_TWICE = (
    "domains/edge/rest/",
    "domains/proxies/rest/",
    "fleet/people/",
    "fleet/plans/",
    "kernel/identity/",
)
"""Suites whose changes of the store must not depend on how often they are run."""
HELD_SECONDS = 1.0
"""Of processor time: however busy the machine is, no handler may keep everybody else waiting for so long."""


@pytest.fixture(autouse=True)
def nobody_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which a handler of a listener worked for a second without giving the loop back."""
    held: list[tuple[str, float]] = []
    report = Watchdog.report

    def noting(dog: Watchdog, handler: str, seconds: float) -> float:
        cpu_seconds = report(dog, handler, seconds)
        held.append((handler, cpu_seconds))
        return cpu_seconds

    monkeypatch.setattr(Watchdog, "report", noting)
    yield
    found = [(handler, seconds) for handler, seconds in held if seconds > HELD_SECONDS]
    assert not found, f"handlers held the event loop: {found}"


@pytest.fixture(autouse=True)
def passwords_are_cheap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash passwords with the least that argon2 allows, except where a test is about what that costs."""
    if request.node.get_closest_marker("real_passwords"):
        return
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "PasswordHasher", lambda: hasher)
    monkeypatch.setattr(passwords, "NOBODYS", NOBODYS)


@pytest.fixture(autouse=True)
def rsa_keys_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give out RSA keys that were made before: hundreds of tests need one, and few need one that is new."""
    monkeypatch.setattr(rsa, "generate_private_key", RSA_KEYS.generate)


@pytest.fixture(autouse=True)
def changes_are_pure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In these suites every change of a store is run several times, on several states."""
    if not str(request.path.relative_to(TESTS)).startswith(RUN_TWICE):
        yield
        return
    with run_twice(monkeypatch):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="Leave out tests that start or open something, or take long."
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    return None if is_quick(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        items[:] = long_first.arranged(items, workers)
    if not config.getoption("--quick"):
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported out of every later collection, which is then cheap enough to make often."""
    del session
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # what a module leaves is collected at its end


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Fail the last test of a module that left something open, not whichever runs when that is found."""
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    gc.collect()
    collect_unraisable(item.config)
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One for all tests of this process; each asks it for a database of its own."""
    with running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def telemetry_place(request: pytest.FixtureRequest, tmp_path: Path) -> TelemetryPlace:
    """For each of the two kinds: what telemetry promises holds wherever it lies."""
    path = tmp_path / "telemetry.db"
    if request.param == "sqlite":
        return TelemetryPlace(path=path)
    server: PostgresServer = request.getfixturevalue("postgres")
    return TelemetryPlace(path=path, url=server.database())

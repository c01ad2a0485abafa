"""An agent beside an NGINX that runs already: what it sees, how it takes over, and every way back."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import structlog
from support.proxies.found_nginx import FoundNginx, found_nginx
from support.proxies.nginx_rig import NGINX, Rig, host, saying
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.proxies.agent.nginx import processes
from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.agent.observing import takeover as takeovers
from fleetplane.domains.proxies.agent.observing.observed import ObservedNginx
from fleetplane.domains.proxies.agent.observing.origin import arguments_of
from fleetplane.domains.proxies.agent.observing.takeover import HELD, INTERRUPTED, Takeover, TakeoverPhase
from fleetplane.domains.proxies.sealed_answers import Opener
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

DEADLINE_SECONDS = 60.0


@pytest.fixture
def found() -> Iterator[FoundNginx]:
    with found_nginx() as one:
        yield one


class Ended(BaseException):
    """The agent was killed here."""


class Hands:
    """An agent's parts that change hands, made anew as often as an agent starts."""

    def __init__(self, rig: Rig, found: FoundNginx) -> None:
        self.rig, self.found = rig, found

    async def start(self, step: Callable[[str], None] = lambda _: None) -> Takeover:
        self.applier: VersionApplier = self.rig.applier()
        self.observed: ObservedNginx = self.found.observed()
        made = Takeover(
            applier=self.applier,
            observed=self.observed,
            path=self.rig.paths.takeover,
            clock=SystemClock(),
            log=structlog.get_logger(),
            step=step,
        )
        made.open()
        await self.applier.open()
        await made.recover()
        return made

    async def take_over(self, hands: Takeover, update: pb.ConfigUpdate) -> ApplyOutcome:
        digest = (await self.observed.look()).configuration.digest
        ordered = asyncio.ensure_future(hands.take_over(update.version, digest))
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not hands.expects and not ordered.done():
                    await asyncio.sleep(0.01)
                if not ordered.done():
                    await hands.apply(update, self.rig.report)
                return await ordered
        finally:
            ordered.cancel()
            with suppress(asyncio.CancelledError):
                await ordered

    def says(self) -> str:
        """On a connection of its own; empty while nobody answers."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.found.port}/", headers={"host": "a.test"}).text
        return ""


def killed_at(step: str) -> Callable[[str], None]:
    def reached(now: str) -> None:
        if now == step:
            raise Ended

    return reached


async def test_looking_on_shows_everything_and_touches_nothing(rig: Rig, found: FoundNginx) -> None:
    hands = Hands(rig, found)
    before, pid = found.texts(), found.pid()
    takeover = await hands.start()
    look = await hands.observed.look()
    told = hands.observed.told(look)
    assert (told.workers, list(told.listening), told.files) == (1, [f"127.0.0.1:{found.port}"], 2)
    assert (told.nginx_version, "http_ssl" in told.modules) == (rig.site.binary.words, True)
    assert not told.problems
    figures = await hands.observed.figures(look)
    assert figures is not None
    assert figures.requests >= 1

    page = json.loads(await hands.observed.page(0))
    shown = msgspec.json.decode(zlib.decompress(base64.b64decode(page["data"])))
    assert {one["path"]: one["text"].encode() for one in shown} == before
    assert page["digest"] == told.digest

    assert hands.says() == "found"
    log = str(found.folder / "logs" / "access.log")
    async with asyncio.timeout(DEADLINE_SECONDS):
        while '"GET / HTTP/1.1" 200' not in await hands.observed.tail(log, 10):
            await asyncio.sleep(0.01)  # NGINX answers first, and then writes that it did
    with pytest.raises(NotFound, match="no log"):
        await hands.observed.tail("/etc/shadow", 10)

    assert (await hands.applier.restart(force=False, within_seconds=1)).error == HELD
    assert (await hands.applier.stop(graceful=True, within_seconds=1)).error == HELD
    assert await hands.applier.revive() is None
    assert takeover.record.phase is TakeoverPhase.OBSERVING
    assert (found.pid(), found.texts(), rig.nginx.master()) == (pid, before, None)


async def test_it_is_taken_over_and_given_back_as_it_was(rig: Rig, found: FoundNginx) -> None:
    hands = Hands(rig, found)
    before, command = found.texts(), found.title()
    takeover = await hands.start()
    outcome = await hands.take_over(takeover, saying(1, found.port, "ours"))
    assert (outcome.state, outcome.error) == (VersionState.SUCCESS, "")
    assert (hands.says(), takeover.is_ours, found.texts()) == ("ours", True, before)
    with pytest.raises(FailedPrecondition):
        await takeover.take_over(1, "")

    again = await hands.start()  # an agent that is started anew goes on
    assert (again.is_ours, hands.says()) == (True, "ours")
    assert (await again.give_back()).state is VersionState.SUCCESS
    assert (hands.says(), found.texts(), rig.nginx.master()) == ("found", before, None)
    assert found.title() == command
    assert again.record == takeovers.TakeoverRecord()

    outcome = await hands.take_over(again, saying(1, found.port, "ours"))  # the same version, once more
    assert (outcome.state, hands.says()) == (VersionState.SUCCESS, "ours")


async def test_a_take_over_that_fails_leaves_the_other_serving(rig: Rig, found: FoundNginx) -> None:
    hands = Hands(rig, found)
    takeover, pid = await hands.start(), found.pid()
    with pytest.raises(FailedPrecondition, match="changed since"):
        await takeover.take_over(1, "another digest")

    bad = saying(1, found.port)
    bad.virtual_hosts[0].custom_directives["no_such_directive"] = "on"
    assert (await hands.take_over(takeover, bad)).state is VersionState.FAILED
    assert (found.pid(), hands.says()) == (pid, "found")  # it was seen before anything was stopped

    clashing = saying(2, found.port, "ours")
    held = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    clashing.virtual_hosts.append(host(held.sockets[0].getsockname()[1], identity="h2"))
    outcome = await hands.take_over(takeover, clashing)
    held.close()
    assert outcome.state is VersionState.FAILED
    assert "Address already in use" in outcome.error
    assert (hands.says(), takeover.record.phase, rig.nginx.master()) == (
        "found",
        TakeoverPhase.OBSERVING,
        None,
    )
    assert "Address already in use" in takeover.record.error


@pytest.mark.parametrize("step", ["recorded", "stopped", "applied"])
async def test_an_agent_that_dies_half_way_goes_back_when_it_starts(
    rig: Rig, found: FoundNginx, step: str
) -> None:
    hands = Hands(rig, found)
    takeover = await hands.start(killed_at(step))
    with pytest.raises(Ended):
        await hands.take_over(takeover, saying(1, found.port, "ours"))
    again = await hands.start()
    assert (hands.says(), rig.nginx.master()) == ("found", None)
    assert again.record == takeovers.TakeoverRecord(error=INTERRUPTED)


@pytest.mark.parametrize("step", ["stood down", "other started"])
async def test_a_return_that_was_cut_short_is_finished(rig: Rig, found: FoundNginx, step: str) -> None:
    hands = Hands(rig, found)
    await hands.take_over(await hands.start(), saying(1, found.port, "ours"))
    takeover = await hands.start(killed_at(step))
    with pytest.raises(Ended):
        await takeover.give_back()
    again = await hands.start()
    assert (hands.says(), rig.nginx.master(), again.record.phase) == ("found", None, TakeoverPhase.OBSERVING)


async def test_what_cannot_be_given_back_is_served_on(rig: Rig, found: FoundNginx) -> None:
    hands = Hands(rig, found)
    takeover = await hands.start()
    await hands.take_over(takeover, saying(1, found.port, "ours"))
    site = found.folder / "sites" / "a.conf"
    text = site.read_text()
    site.write_text("server { no_such_directive; }")  # somebody broke it meanwhile
    outcome = await takeover.give_back()
    assert outcome.state is VersionState.FAILED
    assert "no_such_directive" in outcome.error
    assert (hands.says(), takeover.is_ours) == ("ours", True)
    site.write_text(text)
    assert (await takeover.give_back()).state is VersionState.SUCCESS
    assert hands.says() == "found"


async def test_logs_elsewhere_and_links_are_not_read(rig: Rig, found: FoundNginx) -> None:
    observed = found.observed()
    log = found.folder / "logs" / "access.log"
    found.config.write_text(found.config.read_text() + "error_log /etc/passwd;\n")
    with pytest.raises(InvalidArgument, match="outside"):
        await observed.tail("/etc/passwd", 10)
    log.unlink(missing_ok=True)
    log.symlink_to("/etc/passwd")
    with pytest.raises(InvalidArgument, match="outside"):
        await observed.tail(str(log), 10)
    log.unlink()
    log.symlink_to(found.folder / "nginx.conf")
    with pytest.raises(InvalidArgument, match="link"):
        await observed.tail(str(log), 10)


async def test_keys_are_sent_only_where_the_owner_permits_it(found: FoundNginx, tmp_path: Path) -> None:
    certificate, key = ThrowawayCa().server(tmp_path)
    pair = f"ssl_certificate {certificate}; ssl_certificate_key"
    site = found.folder / "sites" / "tls.conf"
    site.write_text(f"server {{ listen 1 ssl; {pair} {key}; }}")
    asked = Opener()
    with pytest.raises(FailedPrecondition, match="does not let"):
        await found.observed().certificate(str(certificate), asked.public)
    observed = found.observed(sends_keys=True)
    sealed = base64.b64decode(await observed.certificate(str(certificate), asked.public))
    told = json.loads(asked.opened(sealed))
    assert (told["certificate"].strip(), told["private_key"].strip()) == (
        certificate.read_text().strip(),
        key.read_text().strip(),
    )
    with pytest.raises(NotFound):
        await observed.certificate(str(key), asked.public)
    (tmp_path / "other").mkdir()
    _, others = ThrowawayCa().server(tmp_path / "other")
    site.write_text(f"server {{ listen 1 ssl; {pair} {others}; }}")
    with pytest.raises(InvalidArgument, match="another certificate's"):
        await observed.certificate(str(certificate), asked.public)
    site.write_text(f"server {{ listen 1 ssl; {pair} /etc/passwd; }}")
    with pytest.raises(InvalidArgument, match="no certificate with its key"):
        await observed.certificate(str(certificate), asked.public)


async def test_what_a_service_started_is_stopped_and_started_by_its_manager(
    found: FoundNginx, tmp_path: Path
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/asked
case $1 in
  stop) kill -QUIT $(cat {found.pid_file}); while [ -e {found.pid_file} ]; do sleep 0.02; done ;;
  start) {NGINX} -c {found.config} ;;
esac
"""
    )
    program.chmod(0o755)
    observed = found.observed(systemctl=program)
    look = await observed.look()
    assert look.origin is not None
    origin = msgspec.structs.replace(look.origin, unit="nginx.service")
    assert await observed.runner.stop(origin) == ""
    assert found.pid() == 0
    assert await observed.runner.start(origin, lambda: observed.serves(origin, found.pid_file)) == ""
    assert found.pid() not in (0, origin.pid)
    assert (tmp_path / "asked").read_text() == "stop nginx.service\nstart nginx.service\n"


def test_a_stranger_under_the_number_of_the_master_is_no_nginx(found: FoundNginx) -> None:
    assert asyncio.run(found.observed().look()).origin is not None
    os.kill(found.pid(), signal.SIGTERM)
    found.stop()
    found.pid_file.write_text(str(os.getpid()))
    assert asyncio.run(found.observed().look()).origin is None


def test_what_anybody_calls_an_nginx_is_not_looked_at_and_never_started(
    found: FoundNginx, tmp_path: Path
) -> None:
    """Its program would be started as root to give it back."""
    title = f"nginx: master process {NGINX} -c {found.config} -q"
    found.stop()
    with subprocess.Popen([title, "600"], executable="/bin/sleep", user="nobody", cwd="/") as stranger:
        try:
            told = arguments_of(processes.title_of(processes.PROC, stranger.pid))
            assert told == (str(NGINX), "-c", str(found.config), "-q", "600")
            found.pid_file.write_text(str(stranger.pid))
            assert asyncio.run(found.observed().look()).origin is None
        finally:
            stranger.kill()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/zero")):
        found.config.write_text(f"pid {other};")
        look = asyncio.run(found.observed().look())
        assert (look.pid_file, look.origin) == (other, None)

"""An NGINX that an agent found: what is shown of it, and how it is taken over and given back.

What the agent sees of it is in its reports; texts of its configuration and lines of its logs are asked for
each time and kept nowhere on the server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentResult, AgentVerb, CommandPort, Deployer
from fleetplane.domains.proxies.kinds.records import Agent, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Hands, Observed
from fleetplane.domains.proxies.nginx.site import OBSERVES
from fleetplane.domains.proxies.rules.configuration import AgentConfig
from fleetplane.domains.proxies.rules.streams import host_ports
from fleetplane.domains.proxies.sealed_answers import Opener
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, Unavailable

PAGES_LIMIT: Final = 16
TEXT_LIMIT: Final = 8 << 20
"""Bytes of a configuration, unpacked; agents show half of it."""


class ShownFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    text: str


class ShownConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the NGINX that an agent found, as it is on disk."""

    config_path: str
    digest: str
    files: tuple[ShownFile, ...]
    problems: tuple[str, ...]
    """What is not shown, and why."""


class SentCertificate(msgspec.Struct, frozen=True, kw_only=True):
    certificate: str
    private_key: str


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    pages: int
    data: str


class PlannedHost(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    server_name: str
    ports: tuple[int, ...]


class TakeoverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a take-over would do. It is confirmed by its id, which changes as soon as anything else does."""

    id: str
    agent: str
    version: int
    observed_digest: str
    hosts: tuple[PlannedHost, ...]
    streams: tuple[str, ...]
    ports_kept: tuple[int, ...]
    """Listened on now, and served afterwards."""
    ports_added: tuple[int, ...]
    ports_lost: tuple[int, ...]
    """Listened on now, and served by nobody afterwards."""
    warnings: tuple[str, ...]
    valid: bool
    """Whether the agent's NGINX takes the version, as far as a test tells."""
    error: str
    """What it has against it otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handovers:
    workspaces: Workspaces
    commander: CommandPort
    deployer: Deployer

    # Showing.

    async def shown(self, agent: Agent, *, actor: str) -> ShownConfiguration:
        observed = _observed(agent)
        for _ in range(2):  # it may be changed between two pages
            found = await self._pages(agent, actor)
            if found is not None:
                digest, packed = found
                return ShownConfiguration(
                    config_path=observed.config_path,
                    digest=digest,
                    files=_unpacked(packed),
                    problems=observed.problems,
                )
        raise Unavailable("the observed configuration is being changed", hint="try again")

    async def _pages(self, agent: Agent, actor: str) -> tuple[str, str] | None:
        first = await self._page(agent, 0, actor)
        data = [first.data]
        for number in range(1, min(first.pages, PAGES_LIMIT)):
            page = await self._page(agent, number, actor)
            if page.digest != first.digest:
                return None
            data.append(page.data)
        return first.digest, "".join(data)

    async def _page(self, agent: Agent, number: int, actor: str) -> _Page:
        text = await self._told(agent, AgentOrder(verb=AgentVerb.SHOW, page=number), actor)
        try:
            return msgspec.json.decode(text, type=_Page)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Unavailable(f"the agent's answer cannot be read: {error}") from error

    async def log(self, agent: Agent, name: str, lines: int, *, actor: str) -> str:
        """The last lines of a log of the NGINX that an agent found."""
        if name not in _observed(agent).logs:
            raise InvalidArgument(f"{name} is no log of the observed NGINX", field="name")
        return await self._told(agent, AgentOrder(verb=AgentVerb.SHOW, log=name, lines=lines), actor)

    async def certificate(self, agent: Agent, name: str, *, actor: str) -> SentCertificate:
        """A certificate of the NGINX that an agent found, with its key, if the node's owner permits it."""
        _observed(agent)
        opener = Opener()
        order = AgentOrder(verb=AgentVerb.SHOW, certificate=name, seal_to=opener.public)
        sealed = await self._told(agent, order, actor)
        try:
            content = opener.opened(base64.b64decode(sealed, validate=True))
            return msgspec.json.decode(content, type=SentCertificate)
        except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError) as error:
            raise Unavailable(f"the agent's answer cannot be read: {error}") from error

    async def _told(self, agent: Agent, order: AgentOrder, actor: str) -> str:
        result = await self.commander.order(agent, order, actor=actor)
        if not result.success:
            raise FailedPrecondition(result.message)
        return result.output

    # Changing hands.

    async def plan(self, agent: Agent, *, actor: str) -> TakeoverPlan:
        observed, config = _observed(agent), self._wanted(agent)
        digest = (await self._page(agent, 0, actor)).digest  # as it is now, not as it was last reported
        update = wire.config_update(config, dict.fromkeys(config.certificates, b""))
        order = AgentOrder(verb=AgentVerb.VALIDATE, candidate=update.SerializeToString())
        tested = await self.commander.order(agent, order, actor=actor)
        served = {port for host in config.virtual_hosts.values() for port in host_ports(host, "tcp")}
        served |= {one.listen_port for one in config.streams.values() if one.protocol == "tcp"}
        now = _listened_on(observed)
        return TakeoverPlan(
            id=_identity(agent, digest, config),
            agent=agent.spec.name,
            version=config.version,
            observed_digest=digest,
            hosts=tuple(
                PlannedHost(name=one.name, server_name=one.server_name, ports=_ports(one))
                for one in config.virtual_hosts.values()
            ),
            streams=tuple(one.name for one in config.streams.values()),
            ports_kept=tuple(sorted(now & served)),
            ports_added=tuple(sorted(served - now)),
            ports_lost=tuple(sorted(now - served)),
            warnings=tuple(_warnings(observed, config)),
            valid=tested.success,
            error="" if tested.success else tested.message,
        )

    async def take_over(self, agent: Agent, plan: str, *, actor: str) -> AgentResult:
        """Raises `FailedPrecondition` if the plan is not, or is no longer, what would be done."""
        observed, config = _observed(agent), self._wanted(agent)
        if observed.state is not Hands.OBSERVING:
            raise FailedPrecondition(f"the NGINX of {agent.spec.name} is {observed.state}")
        digest = (await self._page(agent, 0, actor)).digest
        if plan != _identity(agent, digest, config):
            raise FailedPrecondition(
                "the plan is not what would be done now: the version or the observed configuration changed",
                hint="look at a new plan and confirm that",
            )
        await self.deployer.retried(agent)  # also what failed at an earlier attempt
        order = AgentOrder(verb=AgentVerb.TAKE_OVER, version=config.version, digest=digest)
        return await self.commander.order(agent, order, actor=actor)

    async def give_back(self, agent: Agent, *, actor: str) -> AgentResult:
        if _observed(agent).state is not Hands.TAKEN_OVER:
            raise FailedPrecondition(f"the NGINX of {agent.spec.name} was not taken over")
        return await self.commander.order(agent, AgentOrder(verb=AgentVerb.GIVE_BACK), actor=actor)

    def _wanted(self, agent: Agent) -> AgentConfig:
        newest = self.workspaces.newest(agent.scope)
        config = self.workspaces.share(agent, newest) if newest is not None else None
        if config is None or not (config.virtual_hosts or config.streams):
            raise FailedPrecondition(
                f"{agent.spec.name} would serve nothing",
                hint="import what it serves now, or add a virtual host",
            )
        return config


def _listened_on(observed: Observed) -> frozenset[int]:
    """Ports, as far as an agent's word for them is one."""
    said = (one.rpartition(":")[2] for one in observed.listening)
    return frozenset(int(one) for one in said if one.isascii() and one.isdecimal() and len(one) <= 5)


def _observed(agent: Agent) -> Observed:
    status = agent.status
    if status is None or status.observed is None or OBSERVES not in status.capabilities:
        raise FailedPrecondition(
            f"{agent.spec.name} observes no NGINX", hint="start the agent with --observe beside one"
        )
    return status.observed


def _identity(agent: Agent, digest: str, config: AgentConfig) -> str:
    parts = (agent.uid, digest, str(config.version), config.digest)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _warnings(observed: Observed, config: AgentConfig) -> Iterable[str]:
    if config.withheld:
        yield f"{len(config.withheld)} virtual hosts wait for their certificate and are not served"
    for name, why in config.refused.items():
        yield f"{name} is not sent: {why}"
    if observed.unit:
        yield f"{observed.unit} started it and may start it again, for example with the machine: disable it"
    if not observed.listening:
        yield "the observed NGINX does not run, or the agent cannot see what it listens on"
    yield from observed.problems
    yield "connections are refused for a moment; those that are open may finish"


def _ports(host: VirtualHostSpec) -> tuple[int, ...]:
    return tuple(sorted(host_ports(host, "tcp")))


def _unpacked(packed: str) -> tuple[ShownFile, ...]:
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(packed, validate=True), TEXT_LIMIT)
        if unpacking.unconsumed_tail or not unpacking.eof:
            raise Unavailable(f"the agent's answer has more than {TEXT_LIMIT} bytes")
        return msgspec.json.decode(text, type=tuple[ShownFile, ...])
    except (binascii.Error, zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise Unavailable(f"the agent's answer cannot be read: {error}") from error

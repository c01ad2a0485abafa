"""A frozen workspace: agents are observed and sent nothing, no certificate is ordered, and it is said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.instances.agents_rig import FakeAgent, Rig, agents_rig, until
from support.instances.certificates_rig import BOSS, controlled, desk

from fleetplane.domains.proxies.acme.issuers import SelfSigned
from fleetplane.domains.proxies.explain import AgentExplainer, CertificateExplainer, HostExplainer
from fleetplane.domains.proxies.kinds.records import CERTIFICATE, CertificateSpec, agent_scope
from fleetplane.domains.proxies.kinds.values import SelectedAgents
from fleetplane.domains.proxies.serving.certificates import OfferedIssuers
from fleetplane.fleet.explain import Explainer
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.freeze import freeze, lift
from fleetplane.kernel.store import Store

CLOCK = SystemClock()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path) as rig:
        yield rig


def codes(explainer: Explainer, name: str) -> Sequence[str]:
    scope = explainer.locate("", name)
    return [one.code for found in explainer.explain(scope, name) for one in found.explanation.reasons]


def hosts(rig: Rig) -> HostExplainer:
    return HostExplainer(rig.store, rig.side.controller._workspaces, CLOCK)


def agents(rig: Rig) -> AgentExplainer:
    return AgentExplainer(rig.store, rig.side.controller, rig.side.controller._workspaces, CLOCK)


async def stop(store: Store, scope: str, **more: int) -> None:
    await freeze(store, scope, reason="migration", actor="ada", domains=("proxies",), **more)


async def connected(rig: Rig, name: str, version: int = 0) -> FakeAgent:
    agent = await rig.agent(name)
    await agent.open()
    await agent.health(version)
    return agent


async def test_a_frozen_agent_is_sent_nothing_until_the_freeze_is_lifted(rig: Rig) -> None:
    why = agents(rig)
    await stop(rig.store, rig.scope.rpartition("/ws/")[0])  # the whole organisation
    host = await rig.host("example.com")
    agent = await connected(rig, "web-01")

    await until(lambda: "FROZEN" in codes(why, agent.agent_id))
    assert rig.deployments(agent.agent_id) == []
    assert rig.state(agent.agent_id) == "online", "what is observed is written all the same"
    assert codes(hosts(rig), host.name) == ["NOT_SENT"]

    assert await lift(rig.store, rig.scope.rpartition("/ws/")[0], actor="ada", domains=("proxies",))
    update = await agent.next("config_update")
    assert [one.id for one in update.virtual_hosts] == [host.name]


async def test_a_freeze_ends_by_itself_and_one_of_another_domain_or_agent_stops_nothing(rig: Rig) -> None:
    await freeze(rig.store, reason="elsewhere", actor="ada")  # as before freezes named domains
    await stop(rig.store, agent_scope(rig.scope, "another"))
    await rig.host("example.com")
    free = await connected(rig, "web-01")
    assert (await free.next("config_update")).version == 2

    await stop(rig.store, rig.scope, expires_at_ns=CLOCK.now_ns() + 4_000_000_000)
    await rig.host("later.example")
    assert (await free.next("config_update")).version == 3


async def test_an_agent_that_serves_more_than_is_known_changes_nothing_while_frozen(rig: Rig) -> None:
    why = agents(rig)
    await stop(rig.store, rig.scope)
    agent = await connected(rig, "web-01", version=7)

    await until(lambda: "FROZEN" in codes(why, agent.agent_id))
    newest = rig.side.controller._workspaces.newest(rig.scope)
    assert newest is not None
    assert newest.version == 1


async def test_a_host_says_at_which_agents_it_is_not_live_and_why(rig: Rig) -> None:
    host = await rig.host("example.com")
    lost = await rig.host("lost.example", target_agents=SelectedAgents(label_selector="env=prod"))
    assert codes(hosts(rig), lost.name) == ["NO_AGENT"]
    away = await rig.agent("away")
    agent = await connected(rig, "web-01")
    update: pb.ConfigUpdate = await agent.next("config_update")

    assert sorted(codes(hosts(rig), host.name)) == ["AGENT_AWAY", "PENDING"]
    await agent.status(update, "FAILED", error="nginx: [emerg] no")
    await until(lambda: "FAILED" in codes(hosts(rig), host.name))
    found = hosts(rig).explain(rig.scope, host.name)
    told = {one.subject: one.message for one in found[0].explanation.reasons}
    assert "nginx: [emerg] no" in told[f"agent/{agent.agent_id}"]
    why = agents(rig)
    assert codes(why, away.agent_id) == ["NEVER_REGISTERED"]
    await until(lambda: {"DEGRADED", "REFUSED"} <= set(codes(why, agent.agent_id)))
    for explainer in (why, hosts(rig)):
        with pytest.raises(NotFound):
            explainer.locate("", "0d0c4a2e-no-such-thing")
        with pytest.raises(NotFound):
            explainer.locate("org/another", host.name if explainer is not why else agent.agent_id)


async def test_a_host_waits_for_its_certificate_or_for_an_agent_that_is_rolled_back(
    rig: Rig,
) -> None:
    spec = CertificateSpec(domain="a.example", provider="selfsigned", auto_renew=True)
    rig.certificates._offered = OfferedIssuers(providers=("selfsigned",), dns=lambda _: True)
    certificate = await rig.certificates.request(rig.scope, spec, actor=BOSS)
    waiting = await rig.host("a.example", port=443, ssl_enabled=True, ssl_certificate_id=certificate.name)
    agent = await connected(rig, "web-01")
    assert codes(hosts(rig), waiting.name) == ["NO_CERTIFICATE"]

    later = await rig.host("later.example")
    await rig.agents.pin(rig.scope, agent.agent_id, 1, actor=BOSS)
    assert codes(hosts(rig), later.name) == ["PINNED"]


async def test_no_certificate_is_ordered_while_frozen_and_one_is_once_the_freeze_is_lifted(
    tmp_path: Path,
) -> None:
    async with desk(tmp_path) as at, controlled(at, {"selfsigned": SelfSigned(at.clock)}) as controller:
        why = CertificateExplainer(at.store, controller, at.clock)
        await stop(at.store, at.scope)
        spec = CertificateSpec(domain="a.example", provider="selfsigned", auto_renew=True)
        made = await at.certificates.request(at.scope, spec, actor=BOSS)

        await until(lambda: "FROZEN" in codes(why, made.name))
        stored = at.store.get(CERTIFICATE, at.scope, made.name)
        assert stored is not None
        assert stored.status is not None
        assert (stored.status.state, stored.status.failures) == ("pending", 0)
        assert await lift(at.store, at.scope, actor="ada", domains=("proxies",))
        await at.reached(made, "active")
        await until(lambda: codes(why, made.name) == [])

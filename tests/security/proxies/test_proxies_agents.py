"""A registration token that somebody else has too must not give them the agent, nor its private keys."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.instances.agents_rig import BOSS, QUICK, FakeAgent, Rig, agents_rig, until
from support.proxies.proxy_api import rest_api

from fleetplane.domains.proxies.agent import enrolment
from fleetplane.domains.proxies.agent.enrolment import (
    Credential,
    CredentialFile,
    ProxyEnroller,
    ServerAddress,
    is_due,
)
from fleetplane.domains.proxies.agents import machines
from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.agents.machines import Approach, Machines
from fleetplane.domains.proxies.kinds.records import AGENT, AGENT_TOKEN, AgentTokenStatus, workspace_scope
from fleetplane.domains.proxies.kinds.values import NamedAgents, SelectedAgents
from fleetplane.domains.proxies.rules.alerts import MACHINE_ALERT
from fleetplane.gen.fleetplane.proxies.v1 import identity_pb2 as pb
from fleetplane.gen.fleetplane.proxies.v1 import identity_pb2_grpc
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2, agent_pb2_grpc
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.store import Draft, Store
from fleetplane.node.link import LinkLost
from fleetplane.node.short_lived import CallFailed


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path) as rig:
        yield rig


@dataclass(slots=True)
class Machine:
    """A key that was made somewhere, and what the server gave for it."""

    rig: Rig
    key_pem: bytes
    csr_pem: str
    identity: pb.Identity | None = None

    async def enrol(self, token: str, hostname: str = "web-01.internal") -> pb.Identity:
        stub: Any = identity_pb2_grpc.AgentIdentityStub(await self.rig.channel())
        request = pb.EnrolRequest(token=token, csr_pem=self.csr_pem, hostname=hostname)
        self.identity = await stub.Enrol(request)
        return self.identity

    async def renew(self, agent_id: str) -> pb.Identity:
        stub: Any = identity_pb2_grpc.AgentIdentityStub(await self.rig.channel())
        self.identity = await stub.Renew(pb.RenewRequest(agent_id=agent_id, csr_pem=self.csr_pem))
        return self.identity

    async def agent(self) -> FakeAgent:
        assert self.identity is not None
        channel = await self.rig.channel(self.key_pem, self.identity.certificate_pem.encode())
        return FakeAgent(agent_pb2_grpc.AgentServiceStub(channel), "", self.identity.agent_id)


def machine(rig: Rig) -> Machine:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return Machine(rig, pem, csr.public_bytes(serialization.Encoding.PEM).decode())


def binding(rig: Rig, agent_id: str) -> AgentTokenStatus:
    found = rig.store.get(AGENT_TOKEN, rig.scope, agent_id)
    assert found is not None
    assert found.status is not None
    return found.status


async def audited(store: Store) -> list[str]:
    return [audit.read(row).action async for row in store.audit()]


def own_certificate(domain: str) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domain)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(domain)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM).decode(), pem.decode()


# Agents that know only their token.


async def test_a_second_agent_with_the_token_never_displaces_a_live_one(rig: Rig) -> None:
    first = await rig.agent("web-01")
    await first.open()
    thief = await rig.client(first.token, first.agent_id)
    for hostname in ("evil.example", "web-01.internal"):
        answer = await thief.open(hostname=hostname)
        assert not answer.success
        assert "another machine is connected" in answer.error_message
        assert await thief.ended() is grpc.StatusCode.ABORTED

    await first.health()
    await until(lambda: rig.side.presences.sighting(first.agent_id).health)  # type: ignore[union-attr]
    assert rig.alerts(first.agent_id)[MACHINE_ALERT] == "critical"
    assert "agent.refuse_machine" in await audited(rig.store)
    refused = binding(rig, first.agent_id).contender
    assert refused is not None
    assert (refused.hostname, refused.address) == ("evil.example", "127.0.0.1")


async def test_the_alert_stays_whatever_the_agent_reports_and_ends_when_dismissed(rig: Rig) -> None:
    first = await rig.agent("web-01")
    await first.open()
    thief = await rig.client(first.token, first.agent_id)
    assert not (await thief.open(hostname="evil.example")).success
    await first.health(alerts=[agent_pb2.Alert(id="other", severity="info", message="hello")])
    await until(lambda: "other" in rig.alerts(first.agent_id))
    await first.health(alerts=[agent_pb2.Alert(id=MACHINE_ALERT, severity="info", message="all is well")])
    await until(lambda: "other" not in rig.alerts(first.agent_id))
    assert rig.alerts(first.agent_id)[MACHINE_ALERT] == "critical"

    refused = binding(rig, first.agent_id).contender
    assert refused is not None
    await rig.side.machines.dismiss(rig.stored(first.agent_id), refused.id, actor=BOSS)
    assert MACHINE_ALERT not in rig.alerts(first.agent_id)


async def test_an_approved_machine_takes_over_once_and_the_one_before_it_is_the_stranger(rig: Rig) -> None:
    old = await rig.agent("web-01")
    await old.open()
    new = await rig.client(old.token, old.agent_id)
    assert not (await new.open(hostname="new.internal")).success
    refused = binding(rig, old.agent_id).contender
    assert refused is not None
    await rig.side.machines.approve(rig.stored(old.agent_id), refused.id, actor=BOSS)
    assert MACHINE_ALERT not in rig.alerts(old.agent_id)

    other = await rig.client(old.token, old.agent_id)
    assert not (await other.open(hostname="third.internal")).success, "nobody else was approved"
    assert (await new.open(hostname="new.internal")).success
    assert await old.ended() is grpc.StatusCode.ABORTED
    assert not (await (await rig.client(old.token, old.agent_id)).open()).success
    assert binding(rig, old.agent_id).approved == ""


async def test_an_agent_whose_connection_broke_unnoticed_comes_back_when_its_old_stream_is_silent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = await rig.agent("web-01")
    await broken.open()
    back = await rig.client(broken.token, broken.agent_id)
    assert not (await back.open()).success
    monkeypatch.setattr(machines, "SILENT_HEARTBEATS", 1.5 / QUICK.heartbeat_seconds)  # it was a long time
    async with asyncio.timeout(60):
        while not (await back.open()).success:
            await asyncio.sleep(0.1)
    assert MACHINE_ALERT not in rig.alerts(broken.agent_id), "it was the same machine"


# Agents that exchanged their token.


async def test_an_exchanged_token_is_worth_nothing_to_anybody_else(rig: Rig) -> None:
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    await mine.enrol(enrolled.token)
    agent = await mine.agent()
    assert (await agent.open()).success

    thief = await rig.client(enrolled.token, enrolled.agent.name)
    assert not (await thief.open()).success
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await machine(rig).enrol(enrolled.token, "evil.example")
    assert refused.value.code() is grpc.StatusCode.ABORTED
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await thief.stub.ReportHealth(
            agent_pb2.HealthReport(), metadata=(("authorization", f"Bearer {enrolled.token}"),)
        )
    assert unary.value.code() is grpc.StatusCode.UNAUTHENTICATED
    agent.leave()
    await until(lambda: rig.side.presences.get(enrolled.agent.name) is None)
    assert not (await thief.open()).success, "also when nobody is connected"
    assert MACHINE_ALERT in rig.alerts(enrolled.agent.name)
    assert (await (await mine.agent()).open()).success


async def test_the_same_key_may_ask_again_and_its_newer_stream_wins(rig: Rig) -> None:
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    first, again = await mine.enrol(enrolled.token), await mine.enrol(enrolled.token)
    assert first.agent_id == again.agent_id == enrolled.agent.name
    old, new = await mine.agent(), await mine.agent()
    assert (await old.open()).success
    assert (await new.open()).success
    assert await old.ended() is grpc.StatusCode.ABORTED
    assert rig.alerts(enrolled.agent.name) == {}


async def test_only_the_bound_key_renews_and_needs_no_token_for_it(rig: Rig) -> None:
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    before = await mine.enrol(enrolled.token)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await machine(rig).renew(enrolled.agent.name)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    after = await mine.renew(enrolled.agent.name)
    assert after.certificate_pem != before.certificate_pem
    assert (await (await mine.agent()).open()).success


async def test_a_certificate_of_one_agent_does_not_speak_for_another(rig: Rig) -> None:
    one, other = await rig.enrol("web-01"), await rig.enrol("web-02")
    mine = machine(rig)
    await mine.enrol(one.token)
    agent = await mine.agent()
    answer = await agent.open(agent_id=other.agent.name)
    assert not answer.success
    agent.token = other.token
    answer = await agent.open()
    assert (answer.success, answer.agent_id) == (True, one.agent.name), "the certificate says who it is"


async def test_a_new_token_revokes_the_certificate_and_ends_its_stream(rig: Rig) -> None:
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    await mine.enrol(enrolled.token)
    agent = await mine.agent()
    await agent.open()
    renewed = await rig.agents.reissue(rig.scope, enrolled.agent.name, hours=1, actor=BOSS)
    assert await agent.ended() is grpc.StatusCode.UNAUTHENTICATED
    assert not (await (await mine.agent()).open()).success
    with pytest.raises(grpc.aio.AioRpcError):
        await mine.renew(enrolled.agent.name)
    with pytest.raises(grpc.aio.AioRpcError):
        await machine(rig).enrol(enrolled.token)
    assert (await machine(rig).enrol(renewed.token)).agent_id == enrolled.agent.name


async def test_its_stream_ends_also_if_whoever_made_the_new_token_left(rig: Rig) -> None:
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    await mine.enrol(enrolled.token)
    agent = await mine.agent()
    await agent.open()
    identity = enrolled.agent.name
    reissuing = asyncio.create_task(rig.agents.reissue(rig.scope, identity, hours=1, actor=BOSS))
    async with asyncio.timeout(60):
        while not rig.store.pending(AGENT_TOKEN.key(rig.scope, identity)):
            await asyncio.sleep(0)
    assert reissuing.cancel()
    assert await agent.ended() is grpc.StatusCode.UNAUTHENTICATED
    assert not (await (await mine.agent()).open()).success


async def test_a_revoked_agent_is_cut_off_and_gets_no_certificate(rig: Rig) -> None:
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    await mine.enrol(enrolled.token)
    agent = await mine.agent()
    await agent.open()
    await rig.revocations.revoke(principal=f"agent/{enrolled.agent.name}", reason="stolen", actor=BOSS)
    await agent.ended()
    assert not (await (await mine.agent()).open()).success
    with pytest.raises(grpc.aio.AioRpcError):
        await mine.renew(enrolled.agent.name)


async def test_a_certificate_that_was_revoked_by_its_serial_is_not_exchanged_for_another(rig: Rig) -> None:
    """The key is in the wrong hands: it proves itself, and has the token, and gets nothing."""
    enrolled = await rig.enrol("web-01")
    mine = machine(rig)
    await mine.enrol(enrolled.token)
    serial = int(binding(rig, enrolled.agent.name).serial, 16)
    await rig.revocations.revoke(serial=serial, reason="stolen", actor=BOSS)
    for asking in (mine.renew(enrolled.agent.name), mine.enrol(enrolled.token)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asking
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert int(binding(rig, enrolled.agent.name).serial, 16) == serial
    assert not (await (await mine.agent()).open()).success


async def test_enrolling_with_the_token_does_not_displace_a_live_agent_that_has_only_the_token(
    rig: Rig,
) -> None:
    first = await rig.agent("web-01")
    await first.open()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await machine(rig).enrol(first.token, "evil.example")
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert binding(rig, first.agent_id).key == ""
    await first.health()
    await until(lambda: rig.side.presences.sighting(first.agent_id).health)  # type: ignore[union-attr]


# Private keys.


async def test_private_keys_go_to_agents_that_serve_them_and_to_nobody_else(rig: Rig) -> None:
    serving, other = await rig.agent("serving"), await rig.agent("other")
    chain, key = own_certificate("shop.example.com")
    certificate = await rig.certificates.bring(rig.scope, None, chain, key, actor=BOSS)
    await rig.host(
        "shop.example.com",
        port=443,
        ssl_enabled=True,
        ssl_certificate_id=certificate.name,
        target_agents=NamedAgents(agent_ids=(serving.agent_id,)),
    )
    await rig.host("plain.example.com")
    got: dict[str, agent_pb2.ConfigUpdate] = {}
    for agent in (serving, other):
        await agent.open()
        await agent.health()
        got[agent.agent_id] = await agent.next("config_update")
    assert certificate.name in got[serving.agent_id].certificates
    assert b"PRIVATE KEY" in got[serving.agent_id].SerializeToString()
    assert not got[other.agent_id].certificates
    assert b"PRIVATE KEY" not in got[other.agent_id].SerializeToString()

    thief = await rig.client(serving.token, serving.agent_id)
    assert not (await thief.open()).success
    assert await thief.ended() is grpc.StatusCode.ABORTED, "and nothing was sent"


@pytest.mark.parametrize("kept", [True, False])
async def test_an_agent_that_claims_a_label_gets_no_keys(tmp_path: Path, kept: bool) -> None:
    policy = AgentPolicy(first_report_seconds=1.0, debounce_seconds=0.0, reported_labels=kept)
    async with agents_rig(tmp_path, policy=policy) as rig:
        claiming, labelled = await rig.agent("claiming"), await rig.agent("labelled", tier="dev")
        chosen = await rig.agent("chosen", tier="payment")
        chain, key = own_certificate("shop.example.com")
        certificate = await rig.certificates.bring(rig.scope, None, chain, key, actor=BOSS)
        await rig.host(
            "shop.example.com",
            port=443,
            ssl_enabled=True,
            ssl_certificate_id=certificate.name,
            target_agents=SelectedAgents(label_selector="tier=payment"),
        )
        sent = []
        for agent in (claiming, labelled, chosen):
            await agent.open(labels={"tier": "payment"})
            await agent.health()
            update = await agent.next("config_update")
            sent.append(b"PRIVATE KEY" in update.SerializeToString())
        assert sent == [False, False, True], "only what an operator set counts"


# What administrators see and decide.


async def test_administrators_see_the_refused_machine_and_decide_nobody_else_does(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        organization, workspace = await api.workspace()
        made = await api.admin.post(f"/workspaces/{workspace}/agents/tokens", {"name": "web-01"})
        path, scope = f"/agents/{made['agent_id']}", workspace_scope(organization, workspace)
        agent = api.store.get(AGENT, scope, made["agent_id"])
        assert agent is not None
        await _activate(api.store, scope, agent.name)
        stranger = Approach(hostname="evil.example", address="192.0.2.9", peer="ipv4:192.0.2.9:1")
        await Machines(api.store, api.clock).note_contender(agent, stranger)

        shown = await api.admin.get(f"{path}/machine")
        assert shown["contender"]["ip_address"] == "192.0.2.9"
        body = {"contender_id": shown["contender"]["id"]}
        for role in ("viewer", "operator"):
            person = await api.person(organization, role)
            for verb in ("machine/approve", "machine/dismiss"):
                assert await person.refused("POST", f"{path}/{verb}", body) == (403, "FORBIDDEN")
            assert await person.refused("POST", f"{path}/token") == (403, "FORBIDDEN")
        outsider = await api.person()
        assert await outsider.refused("GET", f"{path}/machine") == (404, "NOT_FOUND")
        wrong = {"contender_id": "somebody-else"}
        assert await api.admin.refused("POST", f"{path}/machine/approve", wrong) == (409, "CONFLICT")
        approved = await api.admin.post(f"{path}/machine/approve", body, status=200)
        assert (approved["contender"], approved["approved"]) == (None, body["contender_id"])
        log = await api.admin.get(f"/organizations/{organization}/audit-log")
        actions = [entry["action"] for entry in log["data"]]
        assert {"agent.refuse_machine", "agent.approve_machine"} <= set(actions)
        again = await api.admin.post(f"{path}/token")
        assert again["agent_id"] == made["agent_id"]
        assert again["token"] != made["token"]


async def _activate(store: Store, scope: str, agent: str) -> None:
    def change(draft: Draft) -> None:
        token = draft.get(AGENT_TOKEN, scope, agent)
        assert token is not None
        draft.put(AGENT_TOKEN, scope, agent, spec=token.spec, status=AgentTokenStatus(activated_at_ns=1))

    touches = [AGENT_TOKEN.key(scope, agent)]
    await store.transact(change, actor="test", action="test", touches=touches)


# The product's own agent.


async def test_an_agent_that_cannot_look_at_its_certificate_now_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise CallFailed("no memory")

    monkeypatch.setattr(enrolment, "call_elsewhere", failing)
    enroller = ProxyEnroller(
        file=CredentialFile(tmp_path / "credential"),
        connect=lambda: pytest.fail("nobody is to be asked"),
        hostname="web-01",
        clock=SystemClock(),
        log=structlog.get_logger(),
        is_light=True,
    )
    kept = Credential(agent_id="a", key_pem="k", certificate_pem="c")
    assert await enroller.ready(kept) == kept, "it is good enough for now"
    with pytest.raises(LinkLost, match="no memory"):
        await enroller.ready(Credential(token="t"))


@pytest.mark.parametrize("is_light", [False, True])
async def test_our_agent_exchanges_its_token_once_keeps_no_token_and_renews_by_itself(
    rig: Rig, tmp_path: Path, is_light: bool
) -> None:
    enrolled = await rig.enrol("web-01")
    ca = tmp_path / "server-ca.pem"
    ca.write_bytes(rig.root)
    file = CredentialFile(tmp_path / "credential")
    enroller = ProxyEnroller(
        file=file,
        connect=ServerAddress(address=rig.address, authority=ca).channel,
        hostname="web-01",
        clock=SystemClock(),
        log=structlog.get_logger(),
        is_light=is_light,
    )
    first = await enroller.ready(file.load(enrolled.token))
    assert (first.agent_id, first.token) == (enrolled.agent.name, "")
    assert enrolled.token.encode() not in (tmp_path / "credential").read_bytes()
    assert (tmp_path / "credential").stat().st_mode & 0o777 == 0o600
    assert file.load(enrolled.token) == file.load("") == first, "the token that is still given is known"
    assert await enroller.ready(first) == first, "nothing is due"

    doubted = await enroller.ready(first, doubted=True)
    assert doubted.certificate_pem != first.certificate_pem
    assert doubted.key_pem == first.key_pem
    end = x509.load_pem_x509_certificate(doubted.certificate_pem.encode()).not_valid_after_utc
    assert is_due(doubted, (end - dt.timedelta(days=9)).timestamp())
    assert not is_due(doubted, (end - dt.timedelta(days=11)).timestamp())
    async with ServerAddress(address=rig.address, authority=ca).channel(doubted) as channel:
        agent = FakeAgent(agent_pb2_grpc.AgentServiceStub(channel), "", doubted.agent_id)
        assert (await agent.open()).success
        agent.leave()


assert QUICK.heartbeat_seconds == 30, "the streams above are live although they say nothing for a while"

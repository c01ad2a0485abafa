"""What an instance can get out of the certificates that are issued for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from support.boards.boards_rig import BoardKey, boards_rig
from support.instances.configuration_samples import complaints
from support.instances.instances_lab import TENANT, Lab, document, lab, until
from support.instances.original_agent import OriginalAgent, ProcessExit

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.providers.contract import CreateRequest, ObservedMachine, ProviderContext
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.domains.instances.rules import workload
from fleetplane.gen.nstance.v1 import agent_pb2, agent_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity import Authority, LeafProfile, LeafUsage
from fleetplane.kernel.identity.authority import WORKLOAD

HOST = {"kubelet.server": {"kind": "server", "cn": "kubelet", "dns": ["{{ .Instance.Hostname }}"]}}


class Mute(MockProvider):
    """A provider that does not know what its machines are called."""

    def _make(self, request: CreateRequest) -> ObservedMachine:
        return msgspec.structs.replace(super()._make(request), hostname="", private_ipv4="")


def mute(folder: Path) -> MockProvider:
    return Mute(ProviderContext(clock=SystemClock(), state_directory=folder / "mock"))


@asynccontextmanager
async def liar(place: Lab, hostname: str) -> AsyncIterator[OriginalAgent]:
    """An agent that chose its host name itself."""
    [request] = await place.created()
    identity = place.folder / "agent" / "identity"
    agent = OriginalAgent(
        identity,
        place.addresses["registration"],
        place.addresses["agent"],
        place.ca,
        instance_id=request.instance_id,
        report_interval=0.1,
        hostname=hostname,
    )
    (identity / "nonce.jwt").write_text(request.nonce)
    running = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, ProcessExit):
            await running


def names(agent: OriginalAgent) -> list[str]:
    leaf = x509.load_pem_x509_certificate(agent.received_files["kubelet.crt"])
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.DNSName)


def verified(leaf: x509.Certificate, authority: Authority, name: str) -> bool:
    """Whether a client that trusts the authority takes the certificate for a server of this name."""
    roots = Store([member.certificate for member in authority.members])
    verifier = PolicyBuilder().store(roots).build_server_verifier(x509.DNSName(name))
    try:
        verifier.verify(leaf, [])
    except VerificationError:
        return False
    return True


async def test_an_agent_that_calls_itself_the_server_gets_no_certificate_for_that_name(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path, document(certificates=HOST)) as place, liar(place, "nstance-server") as agent:
        await until(lambda: "kubelet.crt" in agent.received_files)
        assert names(agent) == [agent.instance_id], "the provider's word, not the agent's"
        leaf = x509.load_pem_x509_certificate(agent.received_files["kubelet.crt"])
        assert verified(leaf, place.workloads, agent.instance_id)
        assert not verified(leaf, place.kernel.authority, agent.instance_id), "the fleet's does not sign it"
        status = place.instances()[0].status
        assert status is not None
        assert status.hostname == agent.instance_id


async def test_a_certificate_waits_until_the_provider_was_heard(tmp_path: Path) -> None:
    """A record from before names were told apart, and an agent that is faster than the provider's answer."""
    async with lab(tmp_path, document(certificates=HOST)) as place:
        [request] = await place.created()
        await until(lambda: place.instances()[0].status is not None)
        await place.domain._instances.step(
            TENANT,
            request.instance_id,
            lambda status, _now_ns: msgspec.structs.replace(status, proven=None),
            action="test",
        )
        async with liar(place, "nstance-server") as agent:
            await until(lambda: "kubelet.crt" in agent.received_files)
            assert names(agent) == [agent.instance_id]


async def test_an_agents_own_word_stands_in_no_certificate_where_the_provider_says_nothing(
    tmp_path: Path,
) -> None:
    wanted = document(certificates=HOST)
    async with lab(tmp_path, wanted, provider=mute(tmp_path)) as place, liar(place, "db.acme.test") as agent:
        await until(lambda: "kubelet.crt" in agent.received_files)
        assert names(agent) == []


async def test_where_the_template_allows_it_an_agent_names_itself_but_never_the_server(
    tmp_path: Path,
) -> None:
    wanted = document(certificates=HOST)
    wanted["templates"]["worker"]["agent_names"] = True
    provider = mute(tmp_path)
    async with lab(tmp_path, wanted, provider=provider) as place, liar(place, "NSTANCE-server.") as agent:
        await until(lambda: bool(place.domain._errors.recent(TENANT, 5)))
        [error] = place.domain._errors.recent(TENANT, 5)
        assert "is a name of the server itself" in error.text
        assert "kubelet.crt" not in agent.received_files


async def test_an_agent_whose_template_allows_it_is_believed(tmp_path: Path) -> None:
    wanted = document(certificates=HOST)
    wanted["templates"]["worker"]["agent_names"] = True
    async with lab(tmp_path, wanted, provider=mute(tmp_path)) as place, liar(place, "db.acme.test") as agent:
        await until(lambda: "kubelet.crt" in agent.received_files)
        assert names(agent) == ["db.acme.test"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"dns": ("nstance-server",)}, "the server itself"),
        ({"dns": ("Nstance-Server.",)}, "the server itself"),
        ({"dns": ("fleet.example.com",)}, "the server itself"),
        ({"dns": ("*.example.com",)}, "the server itself"),
        ({"common_name": "fleet.example.com"}, "the server itself"),
        ({"ip": ("10.0.0.1",)}, "the server itself"),
        ({"ip": ("::ffff:10.0.0.1",)}, "the server itself"),
        ({"dns": ("a b",)}, "no host name"),
        ({"dns": (".example.net",)}, "no host name"),
        ({"dns": ("nstance-server\0.example.net",)}, "no host name"),
        ({"uri": ("fleetplane://role/boards.admin",)}, "must begin with"),
        ({"uri": ("FleetPlane://role/boards.admin",)}, "must begin with"),
        ({"uri": ("role/boards.admin",)}, "must begin with"),
        ({"uri": ("spiffe://a b",)}, "cannot"),
    ],
)
def test_no_certificate_of_a_workload_names_the_server_or_a_role(fields: dict[str, Any], word: str) -> None:
    profile = LeafProfile(usage=LeafUsage.SERVER, **fields)
    with pytest.raises(InvalidArgument, match=word):
        workload.check(profile, ["fleet.example.com", "10.0.0.1"])


def test_what_workloads_need_is_issued() -> None:
    profile = LeafProfile(
        usage=LeafUsage.SERVER,
        common_name="system:node:knc1",
        dns=("localhost", "a.b.example.net", "*.acme.test"),
        ip=("127.0.0.1", "::1", "10.0.0.2"),
        uri=("spiffe://acme/db",),
    )
    workload.check(profile, ["fleet.example.com", "10.0.0.1", "127.0.0.1"])


def test_a_document_that_asks_for_a_role_or_the_servers_name_is_refused() -> None:
    found = complaints(
        certificates={
            "admin": {"kind": "client", "uri": ["fleetplane://role/boards.admin"]},
            "hidden": {"kind": "client", "uri": ["{{ .Vars.scheme }}://role/boards.admin"]},
            "server": {"kind": "server", "dns": ["nstance-server"], "cn": "Nstance-Server"},
            "good": {"kind": "client", "uri": ["spiffe://acme/{{ .Instance.ID }}"]},
        }
    )
    assert set(found) == {
        "certificates.admin.uri[0]",
        "certificates.hidden.uri[0]",
        "certificates.server.dns[0]",
        "certificates.server.cn",
    }


async def test_boards_take_no_workload_certificate_for_an_administrators(tmp_path: Path) -> None:
    role = "fleetplane://role/boards.admin"
    async with boards_rig(tmp_path) as rig:
        kernel = rig.kernel
        workloads = await Authority.load_or_create(
            kernel.store, kernel.master, kernel.clock, purpose=WORKLOAD
        )
        key = BoardKey()
        profile = LeafProfile(usage=LeafUsage.CLIENT, common_name="boss", uri=(role,), ttl_hours=1)
        forged = workloads.issue_leaf(key.key.public_key(), profile)
        member = await rig.member(0, key, forged.certificate_pem)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await member.original.ListNodes(pi.ListNodesRequest(), timeout=60)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)


async def test_the_agents_listener_takes_no_workload_certificate(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()

        async def answer(authority: Authority) -> grpc.StatusCode:
            key = BoardKey()
            issued = credentials.issue(
                authority,
                key.key.public_key(),
                role=ClientRole.AGENT,
                tenant=TENANT,
                client=request.instance_id,
                life_hours=1.0,
                serial=1,
            )
            secure = grpc.ssl_channel_credentials(place.ca.read_bytes(), key.pem, issued.certificate_pem)
            async with grpc.aio.secure_channel(place.addresses["agent"], secure) as channel:
                call = agent_pb2_grpc.AgentServiceStub(channel).SubmitPublicKeys
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(agent_pb2.PublicKeysRequest(), timeout=60)
                return caught.value.code()

        assert await answer(place.workloads) is grpc.StatusCode.UNAVAILABLE, "not even a handshake"
        assert await answer(place.kernel.authority) is grpc.StatusCode.PERMISSION_DENIED, "known, wrong id"

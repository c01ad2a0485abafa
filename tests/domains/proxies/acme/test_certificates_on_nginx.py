"""From a request to a served certificate: our server, our agent, a real NGINX, a real authority."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import structlog
from cryptography import x509
from support.instances.agents_rig import BOSS, Rig, agents_rig, until
from support.proxies.nginx_rig import STEADY_SECONDS, Backend, backend, binary, paths_in, state_folder
from support.proxies.pebble_lab import Pebble
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.acme.assembly import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.agent.enrolment import ServerAddress
from fleetplane.domains.proxies.agent.root import Tuning, assemble
from fleetplane.domains.proxies.kinds.records import (
    CERTIFICATE,
    Certificate,
    CertificateSpec,
    CertificateStatus,
    OrganizationSpec,
    UpstreamSpec,
    VirtualHostSpec,
    WorkspaceSpec,
)
from fleetplane.domains.proxies.kinds.values import (
    Algorithm,
    CertificateState,
    Header,
    Location,
    NamedAgents,
    UpstreamServer,
)
from fleetplane.domains.proxies.nginx.site import Site
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.rpc import ListenerSpec, open_listener

DOMAIN = "api.example.test"
VISITORS = 3


@dataclass(slots=True, kw_only=True)
class Chain:
    """All of it, running."""

    fleet: Rig
    side: CertificateSide
    backend: Backend
    https_port: int
    agent_id: str
    root_pem: str

    def trust(self) -> ssl.SSLContext:
        """A new one for each client: some of them change it."""
        return ssl.create_default_context(cadata=self.root_pem)

    def status(self, certificate: Certificate) -> CertificateStatus:
        found = self.fleet.store.get(CERTIFICATE, self.fleet.scope, certificate.name)
        assert found is not None
        assert found.status is not None
        return found.status

    async def visit(self) -> tuple[int, int]:
        """The status of a request on a connection of its own, and the serial of what was shown."""
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.https_port, ssl=self.trust(), server_hostname=DOMAIN
            )
            try:
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                writer.write(f"GET /api/v1 HTTP/1.1\r\nHost: {DOMAIN}\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        return int(answer.split(b" ", 2)[1]), x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture
async def chain(tmp_path: Path, authority: Pebble) -> AsyncIterator[Chain]:
    clock = SystemClock()
    https_port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(state_folder())
        behind = await stack.enter_async_context(backend("behind"))
        challenges = f"127.0.0.1:{free_port()}"
        fleet = await stack.enter_async_context(agents_rig(tmp_path, challenge_address=challenges))
        master = MasterKey(b"k" * 32, clock)
        vault = Vault(fleet.store, master)
        side = CertificateSide(
            fleet.store,
            clock,
            master,
            AcmeOptions(authority=authority.options, challenge_address=challenges),
            workspaces=Workspaces(fleet.store, vault),
            vault=vault,
        )
        spec = ListenerSpec(name="challenges", addresses=(challenges,), app=side.board, http1=True)
        await stack.enter_async_context(open_listener(spec, grace_seconds=1))
        ca = tmp_path / "server-ca.pem"
        ca.write_bytes(fleet.root)
        enrolled = await fleet.enrol("edge-1")
        agent = assemble(
            site=Site(
                paths=paths_in(folder),
                binary=binary(),
                addresses=("127.0.0.1",),
                workers="2",
                ports={80: authority.http_port, 443: https_port},
            ),
            managed=True,
            token=enrolled.token,
            server=ServerAddress(address=fleet.address, authority=ca),
            introduction=pb.RegistrationRequest(hostname="edge-1", version="0.1.0"),
            clock=clock,
            log=structlog.get_logger(),
            tuning=Tuning(steady_seconds=STEADY_SECONDS, least_gap_seconds=0.0),
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        works = (agent.run(), side.run_here(), side.run_active())
        running = [tasks.create_task(work) for work in works]
        stack.callback(lambda: [task.cancel() for task in running])
        agent_id = enrolled.agent.name
        await until(lambda: fleet.state(agent_id) == "online" and fleet.deployment_states(agent_id))
        await until(lambda: set(fleet.deployment_states(agent_id).values()) == {"success"})
        yield Chain(
            fleet=fleet,
            side=side,
            backend=behind,
            https_port=https_port,
            agent_id=agent_id,
            root_pem=authority.root_pem(),
        )


async def gateway(chain: Chain) -> Certificate:
    """A certificate, and a virtual host that waits for it."""
    fleet = chain.fleet
    spec = CertificateSpec(domain=DOMAIN, provider="letsencrypt", auto_renew=True)
    certificate = await chain.side.certificates.request(fleet.scope, spec, actor=BOSS)
    upstream = await fleet.hosts.upstreams.create(
        fleet.scope,
        UpstreamSpec(
            name="api-backend",
            algorithm=Algorithm.ROUND_ROBIN,
            servers=(UpstreamServer(address=chain.backend.address),),
        ),
        actor=BOSS,
    )
    location = Location(
        path="/api/v1",
        upstream_id=upstream.name,
        custom_headers=(Header(name="X-Forwarded-Proto", value="$scheme"),),
    )
    await fleet.hosts.create(
        fleet.scope,
        VirtualHostSpec(
            name="API Gateway",
            server_name=DOMAIN,
            listen_port=443,
            ssl_enabled=True,
            ssl_certificate_id=certificate.name,
            http2_enabled=True,
            locations=(location,),
            target_agents=NamedAgents(agent_ids=(chain.agent_id,)),
        ),
        actor=BOSS,
    )
    return certificate


async def served(chain: Chain, serial: int | None = None) -> None:
    """Wait until NGINX shows a certificate, or this one."""

    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, ssl.SSLError):
                _, shown = await chain.visit()
                if serial in (None, shown):
                    return
            await asyncio.sleep(0.05)


async def test_a_gateway_gets_its_certificate_through_nginx_and_renews_it_under_load(chain: Chain) -> None:
    certificate = await gateway(chain)
    await until(lambda: chain.status(certificate).state in (CertificateState.ACTIVE, CertificateState.FAILED))
    first = chain.status(certificate)
    assert first.error == ""
    await served(chain)

    async with httpx.AsyncClient(verify=chain.trust(), http2=True, trust_env=False) as client:
        answer = await client.get(
            f"https://127.0.0.1:{chain.https_port}/api/v1",
            headers={"Host": DOMAIN},
            extensions={"sni_hostname": DOMAIN},
        )
    assert (answer.status_code, answer.text, answer.http_version) == (200, "behind", "HTTP/2")
    assert "X-Forwarded-Proto: https" in chain.backend.requests[-1]

    seen: Counter[tuple[int, int]] = Counter()
    stop = asyncio.Event()

    async def visitor() -> None:
        while not stop.is_set():
            seen[await chain.visit()] += 1

    old = x509.load_pem_x509_certificate(first.chain_pem.encode()).serial_number
    async with asyncio.TaskGroup() as visitors:
        for _ in range(VISITORS):
            visitors.create_task(visitor())
        await until(lambda: seen[200, old] >= 5)
        await chain.side.certificates.renew(chain.fleet.scope, certificate.name, actor=BOSS)
        await until(lambda: chain.status(certificate).fingerprint not in ("", first.fingerprint), seconds=60)
        new = x509.load_pem_x509_certificate(chain.status(certificate).chain_pem.encode()).serial_number
        await until(lambda: seen[200, new] >= 20, seconds=60)
        stop.set()
    assert set(seen) == {(200, old), (200, new)}, "every request was answered, by the old one or the new one"
    await served(chain, new)


async def test_a_private_key_goes_to_those_who_serve_it_and_to_nobody_else(chain: Chain) -> None:
    bystander = await chain.fleet.agent("bystander")
    await bystander.open()
    await bystander.health(0)
    await gateway(chain)
    await served(chain)
    versions: list[int] = []
    while not versions or versions[-1] < max(chain.fleet.deployment_states(chain.agent_id)):
        update = await bystander.next("config_update")
        assert not update.certificates
        assert b"PRIVATE KEY" not in update.SerializeToString()
        versions.append(update.version)
        await bystander.status(update, "SUCCESS")
        await bystander.health(update.version)


async def test_nobody_proves_a_domain_that_points_to_another_tenants_agents(chain: Chain) -> None:
    fleet = chain.fleet
    other = await fleet.places.create_organization(
        OrganizationSpec(name="Mallory", slug="mallory"), owner="mallory", actor=BOSS
    )
    place = await fleet.places.create_workspace(
        other.name, WorkspaceSpec(name="Mine", slug="mine"), actor=BOSS
    )
    spec = CertificateSpec(domain="victim.example.test", provider="letsencrypt", auto_renew=True)
    wanted = await chain.side.certificates.request(place.scope, spec, actor=BOSS)

    def status() -> CertificateStatus | None:
        found = fleet.store.get(CERTIFICATE, place.scope, wanted.name)
        return found.status if found is not None else None

    await until(lambda: (now := status()) is not None and now.state is CertificateState.FAILED)
    failed = status()
    assert failed is not None
    assert "404" in failed.error
    assert failed.fingerprint == ""
    own = await chain.side.certificates.request(fleet.scope, spec, actor=BOSS)
    await until(lambda: chain.status(own).state is CertificateState.ACTIVE)

"""Typed hosts on a real NGINX: one instance for many of them, each with its own name."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from support.proxies.nginx_rig import Rig, state_folder
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa, key_pem

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.kinds.records import (
    AccessListSpec,
    CertificatePart,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

CERTIFICATE = "cert-1"
AUTHORITY = "authority-1"
CLIENT = "client-1"
"""What NGINX may show to others."""


def part(pem: str) -> CertificatePart:
    return CertificatePart(domain="a.test", fingerprint="", chain_pem=pem, expires_at_ns=0)


@dataclass(slots=True)
class Site:
    """What a test needs to know of the NGINX that it talks to."""

    rig: Rig
    applier: VersionApplier
    plain: int
    """Where port 80 is served."""
    secure: int
    """Where port 443 is served."""
    ca: ThrowawayCa
    folder: Path
    version: int = 0

    async def serve(
        self,
        hosts: Mapping[str, VirtualHostSpec],
        upstreams: Mapping[str, UpstreamSpec] | None = None,
        access_lists: Mapping[str, AccessListSpec] | None = None,
        streams: Mapping[str, StreamSpec] | None = None,
    ) -> None:
        """As the server would send them."""
        update = pb.ConfigUpdate.FromString(
            wire.candidate(
                hosts,
                upstreams or {},
                {},
                {AUTHORITY: part(self.ca.pem.decode())},
                access_lists,
                streams,
            )
        )
        self.version += 1
        update.version = self.version
        chain, key = self.ca.server(self.folder)
        update.certificates[CERTIFICATE].CopyFrom(
            pb.Certificate(
                id=CERTIFICATE,
                domain="a.test",
                certificate_pem=chain.read_text(),
                private_key_pem=key.read_text(),
            )
        )
        self.client_context("nginx")
        update.certificates[CLIENT].CopyFrom(
            pb.Certificate(
                id=CLIENT,
                domain="nginx",
                certificate_pem=(self.folder / "client.crt").read_text(),
                private_key_pem=(self.folder / "client.key").read_text(),
            )
        )
        outcome = await self.applier.apply(update, self.rig.report)
        assert outcome.state is VersionState.SUCCESS, outcome.error
        assert self.applier.live is not None
        assert not self.applier.live.manifest.set_aside, self.applier.live.manifest.set_aside

    async def ask(
        self,
        name: str,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        port: int | None = None,
    ) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60.0) as client:
            url = f"http://127.0.0.1:{port or self.plain}{path}"
            given = {"host": name, **(headers or {})}
            return await client.request(method, url, headers=given, content=content)

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca.pem.decode())
        context.check_hostname = False
        return context

    async def ask_securely(
        self, name: str, path: str = "/", *, trust: ssl.SSLContext | None = None, address: str = "127.0.0.1"
    ) -> httpx.Response:
        async with httpx.AsyncClient(verify=trust or self.trust(), timeout=60.0) as client:
            return await client.get(
                f"https://{address}:{self.secure}{path}",
                headers={"host": name},
                extensions={"sni_hostname": name},
            )

    def client_context(self, name: str) -> ssl.SSLContext:
        """As a client that has a certificate of the authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        chain, private = self.folder / "client.crt", self.folder / "client.key"
        chain.write_bytes(self.ca.client(key.public_key(), name))
        private.write_bytes(key_pem(key))
        context = self.trust()
        context.load_cert_chain(chain, private)
        return context


@asynccontextmanager
async def typed_site(tmp_path: Path, *, addresses: tuple[str, ...] = ("127.0.0.1",)) -> AsyncIterator[Site]:
    with state_folder() as folder:
        plain, secure = free_port(), free_port()
        rig = Rig(folder, ports={80: plain, 443: secure})
        rig.site = rig.nginx.site = replace(rig.site, addresses=addresses)
        applier = rig.applier()
        await applier.open()
        yield Site(rig=rig, applier=applier, plain=plain, secure=secure, ca=ThrowawayCa(), folder=tmp_path)

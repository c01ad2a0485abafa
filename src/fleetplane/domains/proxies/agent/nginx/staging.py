"""Makes a release that NGINX takes, out of as much of a configuration as it takes: render, write, test.

Which release goes live, and when, is decided by the `applier`. A configuration that is only tested comes
without private keys, so trials use generated ones.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from fleetplane.domains.proxies.agent.nginx import parts
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.parts import Setting
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersion, StagedVersions
from fleetplane.domains.proxies.agent.nginx.resolved_names import by_address, names_of, resolve
from fleetplane.domains.proxies.nginx.blocks import Unrenderable
from fleetplane.domains.proxies.nginx.context import PartUnrenderable
from fleetplane.domains.proxies.nginx.rendering import checksum, render
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

_LIFE = timedelta(days=1)


def with_keys(candidate: pb.ConfigUpdate, served: pb.ConfigUpdate) -> pb.ConfigUpdate:
    """The configuration with a key for every certificate: the one in service, else a generated pair."""
    made = pb.ConfigUpdate()
    made.CopyFrom(candidate)
    for name, certificate in made.certificates.items():
        if name in served.certificates:
            certificate.CopyFrom(served.certificates[name])
        else:
            certificate.certificate_pem, certificate.private_key_pem = _pair(certificate.domain)
    return made


def _pair(domain: str) -> tuple[str, str]:
    """A self-signed certificate for a name, and its key. Slow to import, and rarely needed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, domain[:64] or "trial")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFE)
        .not_valid_after(now + _LIFE)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), pem.decode()


Down = Mapping[str, frozenset[str]]
_STAMP = re.compile(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d (\[\w+\]) \d+#\d+:(?: \*\d+)? ")
"""What differs each time that NGINX says the same."""


class StagingStep(StrEnum):
    """Where a change stands; each is announced once it is done."""

    STAGED = "staged"
    VALIDATED = "validated"
    JOURNALED = "journaled"
    SWITCHED = "switched"
    SIGNALLED = "signalled"
    RELOADED = "reloaded"
    RECORDED = "recorded"
    REVERTING = "reverting"
    SWITCHED_BACK = "switched back"
    RELOADED_BACK = "reloaded back"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFault:
    """Why a release cannot be made, and which parts of it are to blame, if that can be told."""

    words: str
    parts: Sequence[str] = ()
    yields: bool = False
    """Whether one part is in the way of another."""


class Stager:
    def __init__(
        self,
        nginx: Nginx,
        releases: StagedVersions,
        *,
        serial: Callable[[], int],
        witness: Callable[[StagingStep], None],
    ) -> None:
        self._nginx = nginx
        self._releases = releases
        self._serial = serial
        self._witness = witness

    async def what_can_be(
        self, setting: Setting, live: StagedVersion, *, lineage: str
    ) -> tuple[StagedVersion | None, str]:
        """A tested release, or why there is none; neither, if all that can be served is in service."""
        repeated = checksum(setting.asked) == live.manifest.checksum
        there = repeated and setting.asked.version == live.manifest.version
        error = ""
        while True:
            served = setting.effective()
            nothing_new = bool(setting.aside) and checksum(served) == checksum(live.served)
            if nothing_new and there:
                return None, ""
            if nothing_new and not repeated:
                return None, error or parts.summary(setting.aside)
            down = {upstream.id: live.down.get(upstream.id, frozenset()) for upstream in served.upstreams}
            staged, fault = await self.stage(
                setting.asked,
                served,
                still_listed(served, down),
                beside=live.served,
                set_aside=setting.aside,
                former=setting.former,
                pinned=setting.pinned,
                lineage=lineage,
            )
            if fault is None:
                return staged, ""
            error = error or fault.words
            blamed = setting.blame(fault.parts, fault.words, yields=fault.yields)
            if not blamed and not setting.pin(fault.parts, fault.words):
                return None, fault.words

    async def stage(
        self,
        update: pb.ConfigUpdate,
        served: pb.ConfigUpdate,
        down: Down,
        *,
        beside: pb.ConfigUpdate,
        set_aside: Mapping[str, str] | None = None,
        former: frozenset[str] = frozenset(),
        pinned: Mapping[str, list[str]] | None = None,
        lineage: str = "",
    ) -> tuple[StagedVersion, None] | tuple[None, StagingFault]:
        """A release of an update as it can be served, `beside` being what is in service now."""
        name = f"{update.version}-{self._serial()}"
        in_service = frozenset(host.id for host in beside.virtual_hosts)
        written = by_address(served, pinned or {}, down)
        try:
            rendered = render(
                written, self._nginx.site, release=name, down=down, former=former, in_service=in_service
            )
            resolved = await asyncio.to_thread(resolve, names_of(written))
            staged = await asyncio.to_thread(
                self._releases.stage,
                name,
                update,
                rendered,
                down,
                served=served,
                set_aside=set_aside,
                resolved=resolved,
                pinned=pinned,
                lineage=lineage,
            )
        except PartUnrenderable as problem:
            self._releases.discard(name)
            return None, StagingFault(words=problem.message, parts=[problem.part], yields=True)
        except (Unrenderable, OSError) as problem:
            self._releases.discard(name)
            return None, StagingFault(words=str(problem))
        self._witness(StagingStep.STAGED)
        if words := await self._nginx.test(self._releases.config(name)):
            words = _STAMP.sub(r"\1 ", words).replace(f"{self._releases.folder(name)}/", "")
            self._releases.discard(name)
            return None, StagingFault(words=words, parts=parts.blamed_by_test(words))
        self._witness(StagingStep.VALIDATED)
        return staged, None


def keep_busy_ports_aside(setting: parts.Setting, live: StagedVersion) -> None:
    """Hosts whose port is still somebody else's are not tried again: that would take two reloads."""
    for one, words in live.manifest.set_aside.items():
        if any(_is_busy(address, port) for address, port in parts.busy_addresses(words)):
            setting.blame([one], words)


def _is_busy(address: str, port: int) -> bool:
    """Whether somebody else listens there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def still_listed(update: pb.ConfigUpdate, down: Down) -> dict[str, frozenset[str]]:
    """Only servers that the update has: others would never come up again."""
    known = {upstream.id: {server.address for server in upstream.servers} for upstream in update.upstreams}
    return {
        identity: frozenset(servers & known[identity])
        for identity, servers in down.items()
        if identity in known
    }

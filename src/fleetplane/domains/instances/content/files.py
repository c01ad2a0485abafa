"""The files an instance should have, made on request.

A file is a secret, an object from storage, a certificate for a key that its agent made, or text
rendered from a template. What is needed from outside (secrets, objects, signatures) comes
through arguments; a file that cannot be made yet says what it is waiting for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

import msgspec

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.configuration import InstancesDocument, ownership, rendering
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.schema import Certificate, FileSection
from fleetplane.domains.instances.configuration.templates.template import TemplateData
from fleetplane.domains.instances.kinds import Instance, InstanceStatus, tenant_of
from fleetplane.domains.instances.rules import workload
from fleetplane.domains.instances.rules.stored_paths import object_path
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.certificates import LeafProfile, LeafUsage
from fleetplane.kernel.objects import Objects

SECRET_PREFIX = "cluster/secret/"  # noqa: S105  # where they lie, not what they are
RESEND_SHARE = 0.1
"""The share of its life for which a certificate is kept and sent again. How old one is that an agent
holds is told by when the agent wrote it, so what is written must be nearly new."""

_AUTHORITY_FIELD = "CACert"
"""How templates name the certificates of the authorities."""


class NotReady(Unavailable):
    """The file can be made later: it waits for something that is on its way."""

    reason = "FILE_NOT_READY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddresses:
    """Where agents and operators find this server."""

    registration: str = ""
    agent: str = ""
    operator: str = ""


class InstanceSecrets:
    """Secrets for instances: objects sealed under the master key.

    A secret that names tenants is for those alone. One that names none is for whoever's template names it
    in so many words; a name that is put together from variables, which operators set, never finds it.
    """

    def __init__(
        self,
        objects: Objects,
        master: MasterKey,
        tenants: Callable[[str], Collection[str]] = lambda _name: (),
    ) -> None:
        """`tenants` says whom a secret was put for."""
        self._objects = objects
        self._master = master
        self._tenants = tenants

    async def get(self, name: str, *, tenant: str, written_out: bool) -> bytes:
        tenants = self._tenants(name)
        allowed = ownership.named(tenants, tenant) if tenants else written_out
        found = await self._objects.get(SECRET_PREFIX + name) if allowed else None
        if found is None:
            raise NotFound(
                f"there is no secret {name!r} for tenant {tenant!r}",
                hint=f"fleetplane instances secret put {name} --tenant {tenant}",
            )
        return self._master.open(found.body, purpose=SECRET_PREFIX + name)

    async def put(self, name: str, secret: bytes) -> None:
        await self._objects.put(SECRET_PREFIX + name, self._master.seal(secret, purpose=SECRET_PREFIX + name))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCertificate:
    """A certificate that was issued and may be sent again."""

    pem: bytes
    fingerprint: tuple[str, LeafProfile, str]
    """The key it is for, what stands in it, and the authority that signed it."""
    until_ns: int


class FileMaker:
    def __init__(
        self,
        *,
        objects: Objects,
        secrets: InstanceSecrets,
        authority: Authority,
        workloads: Authority,
        addresses: Callable[[], ServerAddresses],
        now_ns: Callable[[], int],
        images: Callable[[InstancesDocument], Mapping[str, str]],
        reserved: Callable[[], Iterable[str]] = lambda: (),
    ) -> None:
        """`workloads` signs certificate files; none of them may hold one of the names `reserved`."""
        self._objects = objects
        self._secrets = secrets
        self._authority = authority
        self._workloads = workloads
        self._reserved = reserved
        self._addresses = addresses
        self._now_ns = now_ns
        self._images = images
        self._certificates: dict[tuple[str, str], StoredCertificate] = {}

    def forget(self, instance: str) -> None:
        for key in [key for key in self._certificates if key[0] == instance]:
            del self._certificates[key]

    async def make(
        self,
        names: Iterable[str],
        *,
        configuration: InstancesDocument,
        group: EffectiveGroup,
        instance: Instance,
        keys: Mapping[str, str],
    ) -> dict[str, bytes]:
        """The named files, all or none. `keys` maps the agent's key names to their public halves."""
        data = replace(
            self.data(configuration, group, instance),
            # The server's first: some clients read no further.
            ca_cert=(self._authority.trust_pem + self._workloads.trust_pem).decode(),
            workload_ca_cert=self._workloads.trust_pem.decode(),
        )
        return {
            name: await self._make(name, group.files[name], configuration, instance, keys, data)
            for name in sorted(names)
        }

    def data(
        self,
        configuration: InstancesDocument,
        group: EffectiveGroup,
        instance: Instance,
        *,
        nonce: str | None = None,
    ) -> TemplateData:
        """What templates can say about an instance. Its nonce is for user data only.

        The authorities named here are those by which an agent knows the server. Files are for the workloads
        on the instance, and name the authority of workloads too (see `make`).
        """
        status = instance.status or InstanceStatus()
        places = self._addresses()
        return rendering.template_data(
            configuration,
            group,
            instance_id=instance.name,
            ca_cert=self._authority.trust_pem.decode(),
            advertise=msgspec.structs.replace(
                configuration.shard.advertise,
                registration_addr=places.registration,
                agent_addr=places.agent,
                operator_addr=places.operator,
            ),
            hostname=status.hostname,
            fqdn=status.hostname,
            ip4=status.private_ipv4,
            ip6=status.private_ipv6,
            images=self._images(configuration),
            nonce=nonce,
        )

    async def _make(
        self,
        name: str,
        file: FileSection,
        configuration: InstancesDocument,
        instance: Instance,
        keys: Mapping[str, str],
        data: TemplateData,
    ) -> bytes:
        match file.kind:
            case "secret":
                secret = rendering.render_text(file.source, data)
                return await self._secrets.get(
                    secret, tenant=tenant_of(instance), written_out=secret == file.source
                )
            case "storage":
                path = object_path(file.source, data)
                found = await self._objects.get(path)
                if found is None:
                    raise NotFound(f"{name}: there is no object {path!r}")
                return found.body
            case "certificate":
                return self._certificate(name, file, configuration, instance, keys, data)
            case "env" | "json" | "string":
                return rendering.render_file(file, data)
        assert_never(file.kind)

    def _certificate(
        self,
        name: str,
        file: FileSection,
        configuration: InstancesDocument,
        instance: Instance,
        keys: Mapping[str, str],
        data: TemplateData,
    ) -> bytes:
        assert isinstance(file.template, str)
        assert file.key is not None
        pem = keys.get(key_name(file))
        if pem is None:
            raise NotReady(f"{name} waits for the agent's key {key_name(file)!r}")
        certificate = configuration.certificates.get(file.template)
        if certificate is None:
            raise FailedPrecondition(
                f"{name}: there is no certificate {file.template!r} in the configuration"
            )
        template = configuration.templates.get(instance.spec.template)
        believed = data if template is not None and template.agent_names else _proven(data, instance)
        profile = _profile(certificate, believed)
        try:
            workload.check(profile, self._reserved())
        except InvalidArgument as error:
            raise FailedPrecondition(f"{name}: {error.message}", field=error.field) from error
        fingerprint = (pem, profile, self._workloads.key_id)
        kept = self._certificates.get((instance.name, name))
        if kept is None or kept.fingerprint != fingerprint or self._now_ns() >= kept.until_ns:
            public_key = credentials.load_public_key(pem.encode(), field="public_key_pem")
            issued = self._workloads.issue_leaf(public_key, profile)
            life_ns = round(issued.not_after.timestamp() * 1e9) - self._now_ns()
            kept = StoredCertificate(
                pem=issued.leaf_pem,
                fingerprint=fingerprint,
                until_ns=self._now_ns() + round(life_ns * RESEND_SHARE),
            )
            self._certificates[instance.name, name] = kept
        return kept.pem


def key_name(file: FileSection) -> str:
    """The base name of the key pair behind a certificate file."""
    assert file.key is not None
    return file.key.name.removesuffix(".pub")


def keys_wanted(group: EffectiveGroup) -> set[str]:
    """The key pairs that the group's agents should make."""
    return {
        key_name(file) for file in group.files.values() if file.kind == "certificate" and file.key is not None
    }


def names_authority(group: EffectiveGroup) -> bool:
    """Whether a file of the group may hold the certificates of the authorities."""
    return any(_AUTHORITY_FIELD in str((file.template, file.source)) for file in group.files.values())


def certificate_lives(configuration: InstancesDocument, group: EffectiveGroup) -> dict[str, float]:
    """How long each certificate file of the group is good for, in seconds."""
    lives = {}
    for name, file in group.files.items():
        if file.kind == "certificate" and isinstance(file.template, str):
            certificate = configuration.certificates.get(file.template)
            if certificate is not None:
                lives[name] = float(certificate.ttl_hours) * 3600.0
    return lives


def _proven(data: TemplateData, instance: Instance) -> TemplateData:
    """The data without names and addresses that nobody but the agent has said."""
    proven = instance.status.proven if instance.status is not None else None
    if proven is None:
        raise NotReady("certificates wait for what the provider calls the machine")
    return replace(
        data,
        hostname=data.hostname if "hostname" in proven else "",
        fqdn=data.fqdn if "hostname" in proven else "",
        ip4=data.ip4 if "private_ipv4" in proven else "",
        ip6=data.ip6 if "private_ipv6" in proven else "",
    )


def _profile(certificate: Certificate, data: TemplateData) -> LeafProfile:
    def many(texts: Iterable[str]) -> tuple[str, ...]:
        return tuple(filter(None, (rendering.render_text(text, data) for text in texts)))

    return LeafProfile(
        usage=LeafUsage(certificate.kind),
        common_name=rendering.render_text(certificate.cn or "", data),
        organization=many(certificate.organization),
        country=many(certificate.country),
        province=many(certificate.province),
        locality=many(certificate.locality),
        street=many(certificate.street),
        postal_code=many(certificate.postal_code),
        dns=many(certificate.dns),
        ip=many(certificate.ip),
        uri=many(certificate.uri),
        ttl_hours=float(certificate.ttl_hours),
    )

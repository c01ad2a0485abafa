"""The files an instance should have, made on request.

A file is a secret, an object from storage, a certificate for a key that its agent made, or text
rendered from a template. What is needed from outside (secrets, objects, signatures) comes
through arguments; a file that cannot be made yet says what it is waiting for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.configuration import Configuration, templates
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.schema import Certificate, File
from fleetplane.domains.instances.configuration.templates import TemplateData
from fleetplane.domains.instances.kinds import Instance
from fleetplane.kernel.errors import FailedPrecondition, NotFound, Unavailable
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.profile import LeafProfile, LeafUsage
from fleetplane.kernel.objects import Objects

SECRET_PREFIX = "cluster/secret/"  # noqa: S105  # where they lie, not what they are
RENEW_BEFORE = 0.33
"""The share of its life that a kept certificate must still have ahead of it to be sent again."""


class NotReady(Unavailable):
    """The file can be made later: it waits for something that is on its way."""

    reason = "FILE_NOT_READY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where agents and operators find this server."""

    registration: str = ""
    agent: str = ""
    operator: str = ""


class Secrets:
    """Secrets for instances: objects sealed under the master key."""

    def __init__(self, objects: Objects, master: MasterKey) -> None:
        self._objects = objects
        self._master = master

    async def get(self, name: str) -> bytes:
        found = await self._objects.get(SECRET_PREFIX + name)
        if found is None:
            raise NotFound(f"there is no secret {name!r}", hint="fleetplane instances secret put")
        return self._master.open(found.body, purpose=SECRET_PREFIX + name)

    async def put(self, name: str, secret: bytes) -> None:
        await self._objects.put(SECRET_PREFIX + name, self._master.seal(secret, purpose=SECRET_PREFIX + name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A certificate that was issued and may be sent again."""

    pem: bytes
    fingerprint: tuple[str, LeafProfile]
    renew_at_ns: int


class FileMaker:
    def __init__(
        self, *, objects: Objects, secrets: Secrets, authority: Authority, addresses: Callable[[], Addresses],
        now_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        self._objects = objects
        self._secrets = secrets
        self._authority = authority
        self._addresses = addresses
        self._now_ns = now_ns
        self._certificates: dict[tuple[str, str], Kept] = {}

    def forget(self, instance: str) -> None:
        for key in [key for key in self._certificates if key[0] == instance]:
            del self._certificates[key]

    async def make(
        self,
        names: Iterable[str],
        *,
        configuration: Configuration,
        group: EffectiveGroup,
        instance: Instance,
        keys: Mapping[str, str],
    ) -> dict[str, bytes]:
        """The named files, all or none. `keys` maps the agent's key names to their public halves."""
        data = self.data(configuration, group, instance).mapping()
        return {
            name: await self._make(name, group.files[name], configuration, instance, keys, data)
            for name in sorted(names)
        }

    def data(
        self,
        configuration: Configuration,
        group: EffectiveGroup,
        instance: Instance,
        *,
        nonce: str | None = None,
    ) -> TemplateData:
        status = instance.status
        addresses = self._addresses()
        return TemplateData(
            instance_id=instance.name,
            instance_kind=instance.spec.prefix,
            arch=group.arch,
            instance_type=instance.spec.instance_type or group.instance_type,
            hostname=status.hostname if status else "",
            fqdn=status.hostname if status else "",
            ip4=status.private_ipv4 if status else "",
            ip6=status.private_ipv6 if status else "",
            cluster_id=configuration.cluster.id,
            ca_cert=self._authority.certificate_pem.decode(),
            shard=configuration.shard.id,
            registration_addr=addresses.registration,
            agent_addr=addresses.agent,
            operator_addr=addresses.operator,
            provider_kind=configuration.shard.infra.provider,
            region=configuration.shard.infra.region,
            zone=configuration.shard.infra.zone,
            vars={**group.vars, **instance.spec.vars},
            images={name: image.fallback or "" for name, image in configuration.images.items()},
            nonce=nonce,
        )

    async def _make(
        self,
        name: str,
        file: File,
        configuration: Configuration,
        instance: Instance,
        keys: Mapping[str, str],
        data: Mapping[str, object],
    ) -> bytes:
        match file.kind:
            case "secret":
                return await self._secrets.get(_rendered(file.source, data))
            case "storage":
                path = _rendered(file.source, data)
                found = await self._objects.get(path)
                if found is None:
                    raise NotFound(f"{name}: there is no object {path!r}")
                return found.body
            case "certificate":
                return self._certificate(name, file, configuration, instance, keys, data)
            case "env":
                assert isinstance(file.template, dict)
                lines = (f"{key}={_rendered(value, data)}" for key, value in sorted(file.template.items()))
                return "\n".join(lines).encode()
            case "json":
                return json.dumps(rendered_deep(file.template, data), indent=2, ensure_ascii=False).encode()
            case "string":
                assert isinstance(file.template, str)
                return _rendered(file.template, data).encode()
        assert_never(file.kind)

    def _certificate(
        self,
        name: str,
        file: File,
        configuration: Configuration,
        instance: Instance,
        keys: Mapping[str, str],
        data: Mapping[str, object],
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
        profile = _profile(certificate, data)
        fingerprint = (pem, profile)
        kept = self._certificates.get((instance.name, name))
        if kept is None or kept.fingerprint != fingerprint or self._now_ns() >= kept.renew_at_ns:
            public_key = credentials.load_public_key(pem.encode(), field="public_key_pem")
            issued = self._authority.issue_leaf(public_key, profile)
            life_ns = round(issued.not_after.timestamp() * 1e9) - self._now_ns()
            kept = Kept(
                pem=issued.leaf_pem,
                fingerprint=fingerprint,
                renew_at_ns=self._now_ns() + round(life_ns * (1 - RENEW_BEFORE)),
            )
            self._certificates[instance.name, name] = kept
        return kept.pem


def key_name(file: File) -> str:
    """The base name of the key pair behind a certificate file."""
    assert file.key is not None
    return file.key.name.removesuffix(".pub")


def keys_wanted(group: EffectiveGroup) -> set[str]:
    """The key pairs that the group's agents should make."""
    return {
        key_name(file) for file in group.files.values() if file.kind == "certificate" and file.key is not None
    }


def _profile(certificate: Certificate, data: Mapping[str, object]) -> LeafProfile:
    def many(texts: Iterable[str]) -> tuple[str, ...]:
        return tuple(filter(None, (_rendered(text, data) for text in texts)))

    return LeafProfile(
        usage=LeafUsage(certificate.kind),
        common_name=_rendered(certificate.cn or "", data),
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


def _rendered(text: object, data: Mapping[str, object]) -> str:
    return templates.compile(str(text)).render(data)


def rendered_deep(value: object, data: Mapping[str, object]) -> object:
    """Every text in a JSON value, rendered."""
    if isinstance(value, str):
        return _rendered(value, data)
    if isinstance(value, dict):
        return {key: rendered_deep(item, data) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rendered_deep(item, data) for item in value]
    return value

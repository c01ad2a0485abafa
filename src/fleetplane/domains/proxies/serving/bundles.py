"""A workspace's configuration as a file, and how what it refers to becomes ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.kinds.records import StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import Location, Value
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest.bodies import CreateStream
from fleetplane.domains.proxies.serving.hosts import normal
from fleetplane.domains.proxies.typed_options import Access, HostTls


class BundledUpstream(requests.CreateUpstream, frozen=True, kw_only=True):
    id: str


class BundledHost(requests.CreateVirtualHost, frozen=True, kw_only=True):
    id: str


class BundledAccessList(requests.CreateAccessList, frozen=True, kw_only=True):
    id: str


class BundledStream(CreateStream, frozen=True, kw_only=True):
    id: str


class BundledCertificate(Value, frozen=True, kw_only=True):
    """Only what tells which one is meant."""

    id: str
    domain: str
    provider: str


class Bundle(Value, frozen=True, kw_only=True):
    """A workspace's configuration as a file: what an export gives and an import takes."""

    format: Literal["fleetplane.proxies/1"]
    settings: requests.PutSettings | UnsetType = UNSET
    upstreams: tuple[BundledUpstream, ...] = ()
    certificates: tuple[BundledCertificate, ...] = ()
    virtual_hosts: tuple[BundledHost, ...] = ()
    access_lists: tuple[BundledAccessList, ...] | UnsetType = UNSET
    streams: tuple[BundledStream, ...] | UnsetType = UNSET


def pointing(
    spec: VirtualHostSpec, upstreams: Mapping[str, str], certificates: Mapping[str, str]
) -> VirtualHostSpec:
    """A host whose references are ours."""

    def moved(location: Location) -> Location:
        if location.upstream_id is UNSET:
            return location
        identity = upstreams.get(location.upstream_id, location.upstream_id)
        canaries = location.canaries
        if canaries:
            to = (
                msgspec.structs.replace(one, upstream_id=upstreams.get(one.upstream_id, one.upstream_id))
                for one in canaries.to
            )
            canaries = msgspec.structs.replace(canaries, to=tuple(to))
        return msgspec.structs.replace(location, upstream_id=identity, canaries=canaries)

    certificate = spec.ssl_certificate_id
    return normal(
        msgspec.structs.replace(
            spec,
            locations=tuple(moved(location) for location in spec.locations),
            ssl_certificate_id=certificates.get(certificate, certificate) if certificate else None,
            tls=_trusting(spec.tls, certificates),
        )
    )


def listing(spec: VirtualHostSpec, ids: Mapping[str, str]) -> VirtualHostSpec:
    """A host whose access lists are ours."""

    def moved(access: Access | UnsetType) -> Access | UnsetType:
        if not (access and access.list_ids):
            return access
        return msgspec.structs.replace(access, list_ids=tuple(ids.get(one, one) for one in access.list_ids))

    return msgspec.structs.replace(
        spec,
        access=moved(spec.access),
        locations=tuple(msgspec.structs.replace(one, access=moved(one.access)) for one in spec.locations),
    )


def streaming(spec: StreamSpec, upstreams: Mapping[str, str]) -> StreamSpec:
    """A stream whose upstreams are ours."""
    own = spec.upstream_id
    routes = spec.routes and tuple(
        msgspec.structs.replace(one, upstream_id=upstreams.get(one.upstream_id, one.upstream_id))
        for one in spec.routes
    )
    return msgspec.structs.replace(spec, upstream_id=own and upstreams.get(own, own), routes=routes)


def securing(spec: UpstreamSpec, certificates: Mapping[str, str]) -> UpstreamSpec:
    """An upstream whose certificates are ours."""
    if not spec.tls:
        return spec
    given = {
        name: certificates.get(identity, identity)
        for name in ("authority_id", "client_certificate_id")
        if (identity := getattr(spec.tls, name))
    }
    return msgspec.structs.replace(spec, tls=msgspec.structs.replace(spec.tls, **given))


def _trusting(tls: HostTls | UnsetType, certificates: Mapping[str, str]) -> HostTls | UnsetType:
    if not (tls and tls.client_certificates):
        return tls
    clients = tls.client_certificates
    ours = certificates.get(clients.authority_id, clients.authority_id)
    return msgspec.structs.replace(
        tls, client_certificates=msgspec.structs.replace(clients, authority_id=ours)
    )

"""What is served: virtual hosts and upstreams. Secrets in what operators write are masked for everybody."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.kinds.passwords import host_without_hashes
from fleetplane.domains.proxies.kinds.records import (
    UPSTREAM,
    VIRTUAL_HOST,
    Upstream,
    UpstreamSpec,
    VirtualHost,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.resources.places import MIRROR, place, references
from fleetplane.domains.proxies.typed_options import Balancing, Canaries, ConnectionLimit, RateLimit
from fleetplane.fleet.masking import without_secrets
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import (
    READING,
    Column,
    PublicResource,
    Related,
    ResourceVerb,
    ResourceView,
    ViewReader,
)
from fleetplane.kernel.resources import SpecT

_NO_SECRETS = (RateLimit, ConnectionLimit, Canaries, Balancing)
"""Options with fields that are only called like secrets: a `key` by which requests are counted."""


def _for_readers(spec: SpecT) -> SpecT:
    """A spec with its secrets masked, and nothing else: what is shown can be applied elsewhere."""
    shown: SpecT = _unmasked(without_secrets(spec), spec)
    return shown


def _unmasked(shown: Any, real: Any) -> Any:
    if isinstance(real, _NO_SECRETS):
        return real
    if isinstance(real, msgspec.Struct):
        fields = real.__struct_fields__
        return msgspec.structs.replace(
            shown, **{name: _unmasked(getattr(shown, name), getattr(real, name)) for name in fields}
        )
    return tuple(map(_unmasked, shown, real)) if isinstance(real, tuple) else shown


def host_view(host: VirtualHost, reading: ViewReader) -> ResourceView[Any, NoStatus]:
    """What is shown of a virtual host."""
    spec = MIRROR.shown(host_without_hashes(_for_readers(host.spec)), references(host.scope, reading))
    return ResourceView(spec=spec, status=None)


VIRTUAL_HOSTS = PublicResource(
    name="virtual-host",
    plural="virtual-hosts",
    short=("vh", "host", "hosts"),
    summary="Names that proxies answer, and what they do with requests",
    kind=VIRTUAL_HOST,
    spec=MIRROR.shape(VirtualHostSpec),
    status=NoStatus,
    view=host_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda host, _reading: host.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SERVER-NAME", value=".spec.serverName"),
        Column(title="PORT", value=".spec.listenPort", type="number"),
        Column(title="TLS", value=".spec.sslEnabled"),
        Column(title="CERTIFICATE", value=".spec.certificate"),
        Column(title="LOCATIONS", value=lambda shown: len(shown["spec"]["locations"]), type="number"),
        Column(title="AGE", value=".metadata.createdAt", type="age", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN},
    relates=(Related(resource="certificate", path=".spec.certificate"),),
    explain="host",
    search=(".metadata.name", ".spec.serverName"),
)


def upstream_view(upstream: Upstream, reading: ViewReader) -> ResourceView[Any, NoStatus]:
    """What is shown of an upstream."""
    spec = MIRROR.shown(_for_readers(upstream.spec), references(upstream.scope, reading))
    return ResourceView(spec=spec, status=None)


UPSTREAMS = PublicResource(
    name="upstream",
    plural="upstreams",
    short=("up",),
    summary="Servers behind proxies",
    kind=UPSTREAM,
    spec=MIRROR.shape(UpstreamSpec),
    status=NoStatus,
    view=upstream_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda upstream, _reading: upstream.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="ALGORITHM", value=".spec.algorithm"),
        Column(
            title="SERVERS",
            value=lambda shown: ",".join(one["address"] for one in shown["spec"]["servers"][:4]),
        ),
        Column(title="CHECKED", value=".spec.healthCheck.enabled"),
    ),
    search=(".metadata.name",),
)

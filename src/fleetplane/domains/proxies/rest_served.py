"""REST: virtual hosts, upstreams, certificates and settings of a workspace."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.domains.proxies import requests, views
from fleetplane.domains.proxies.access import OPERATE, RAW, READ, Access
from fleetplane.domains.proxies.certificates import Certificates
from fleetplane.domains.proxies.hosts import Hosts
from fleetplane.domains.proxies.kinds import (
    CERTIFICATE,
    UPSTREAM,
    VIRTUAL_HOST,
    Certificate,
    CertificateSpec,
    SettingsSpec,
    VirtualHost,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.ports import Revoker
from fleetplane.domains.proxies.rest import (
    CREATED,
    NO_CONTENT,
    PAGING,
    ProxyCall,
    actor,
    changes,
    created,
    done,
    if_match,
    shown,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.web.paging import Listing, in_order, listing, paging
from fleetplane.web.routes import Answer, Route

_HOSTS, _UPSTREAMS, _CERTIFICATES, _SETTINGS = "Virtual hosts", "Upstreams", "Certificates", "Settings"
_OF_WORKSPACE = "/workspaces/{workspace_id}"


class ServedRoutes:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        access: Access,
        hosts: Hosts,
        certificates: Certificates,
        revoker: Revoker,
    ) -> None:
        self._revoker = revoker
        self._store = store
        self._clock = clock
        self._access = access
        self._hosts = hosts
        self._certificates = certificates

    def routes(self) -> Sequence[Route]:
        return (
            *self._host_routes(),
            *self._upstream_routes(),
            *self._certificate_routes(),
            Route(
                method="GET", path=f"{_OF_WORKSPACE}/settings", handler=self.settings, tag=_SETTINGS,
                summary="Get the global settings", permission=READ, answer=SettingsSpec,
            ),
            Route(
                method="PUT", path=f"{_OF_WORKSPACE}/settings", handler=self.put_settings, tag=_SETTINGS,
                summary="Replace the global settings", permission=RAW, body=requests.PutSettings,
                answer=SettingsSpec,
            ),
        )  # fmt: skip

    def _host_routes(self) -> Sequence[Route]:
        many, one = f"{_OF_WORKSPACE}/virtual-hosts", "/virtual-hosts/{virtual_host_id}"
        return (
            Route(
                method="GET", path=many, handler=self.hosts, summary="List virtual hosts", tag=_HOSTS,
                permission=READ, answer=Listing[views.VirtualHostView], query=PAGING,
            ),
            Route(
                method="POST", path=many, handler=self.create_host, summary="Create a virtual host",
                tag=_HOSTS, permission=OPERATE, body=requests.CreateVirtualHost,
                answer=views.VirtualHostView, status=CREATED,
            ),
            Route(
                method="GET", path=one, handler=self.host, summary="Get a virtual host", tag=_HOSTS,
                permission=READ, answer=views.VirtualHostView,
            ),
            Route(
                method="PATCH", path=one, handler=self.update_host, summary="Change a virtual host",
                tag=_HOSTS, permission=OPERATE, body=requests.UpdateVirtualHost, answer=views.VirtualHostView,
            ),
            Route(
                method="DELETE", path=one, handler=self.delete_host, summary="Delete a virtual host",
                tag=_HOSTS, permission=OPERATE, status=NO_CONTENT,
            ),
        )  # fmt: skip

    def _upstream_routes(self) -> Sequence[Route]:
        many, one = f"{_OF_WORKSPACE}/upstreams", "/upstreams/{upstream_id}"
        return (
            Route(
                method="GET", path=many, handler=self.upstreams, summary="List upstreams", tag=_UPSTREAMS,
                permission=READ, answer=Listing[views.UpstreamView], query=PAGING,
            ),
            Route(
                method="POST", path=many, handler=self.create_upstream, summary="Create an upstream",
                tag=_UPSTREAMS, permission=OPERATE, body=requests.CreateUpstream,
                answer=views.UpstreamView, status=CREATED,
            ),
            Route(
                method="GET", path=one, handler=self.upstream, summary="Get an upstream", tag=_UPSTREAMS,
                permission=READ, answer=views.UpstreamView,
            ),
            Route(
                method="PATCH", path=one, handler=self.update_upstream, summary="Change an upstream",
                tag=_UPSTREAMS, permission=OPERATE, body=requests.UpdateUpstream, answer=views.UpstreamView,
            ),
            Route(
                method="DELETE", path=one, handler=self.delete_upstream, summary="Delete an upstream",
                tag=_UPSTREAMS, permission=OPERATE, status=NO_CONTENT,
            ),
        )  # fmt: skip

    def _certificate_routes(self) -> Sequence[Route]:
        many, one = f"{_OF_WORKSPACE}/certificates", "/certificates/{certificate_id}"
        return (
            Route(
                method="GET", path=many, handler=self.certificates, summary="List certificates",
                tag=_CERTIFICATES, permission=READ, answer=Listing[views.CertificateView], query=PAGING,
            ),
            Route(
                method="POST", path=many, handler=self.request_certificate, tag=_CERTIFICATES,
                summary="Request a certificate; it is pending until it has been issued",
                permission=OPERATE, body=requests.RequestCertificate, answer=views.CertificateView,
                status=CREATED,
            ),
            Route(
                method="POST", path=f"{many}/import", handler=self.import_certificate, tag=_CERTIFICATES,
                summary="Bring a certificate and its key", permission=OPERATE,
                body=requests.ImportCertificate, answer=views.CertificateView, status=CREATED,
            ),
            Route(
                method="GET", path=one, handler=self.certificate, summary="Get a certificate",
                tag=_CERTIFICATES, permission=READ, answer=views.CertificateView,
            ),
            Route(
                method="POST", path=f"{one}/renew", handler=self.renew_certificate, tag=_CERTIFICATES,
                summary="Renew a certificate now", permission=OPERATE, answer=views.CertificateView,
                status=202,
            ),
            Route(
                method="POST", path=f"{one}/revoke", handler=self.revoke_certificate, tag=_CERTIFICATES,
                summary="Have its issuer revoke a certificate", permission=OPERATE,
                body=requests.RevokeCertificate, answer=views.CertificateView,
            ),
            Route(
                method="DELETE", path=one, handler=self.delete_certificate, summary="Delete a certificate",
                tag=_CERTIFICATES, permission=OPERATE, status=NO_CONTENT,
            ),
        )  # fmt: skip

    # Virtual hosts.

    async def hosts(self, call: ProxyCall) -> Answer[Listing[views.VirtualHostView]]:
        found = in_order(self._store.list(VIRTUAL_HOST, call.scope))
        return Answer(content=listing(found, paging(call.query), views.virtual_host))

    async def create_host(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        body: requests.CreateVirtualHost = call.body
        spec = body.spec()
        self._check_raw(call, frozenset(), spec)
        answer = call.answering(self._created_host)
        return answer(await self._hosts.create(call.scope, spec, actor=actor(call)))

    def _created_host(self, made: VirtualHost) -> Answer[views.VirtualHostView]:
        view = views.virtual_host(made, detailed=True, warnings=self._warnings(made))
        return created(view, made, "virtual-hosts")

    async def host(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        found = self._hosts.get(call.scope, call.path["virtual_host_id"])
        return shown(views.virtual_host(found, detailed=True), found)

    async def update_host(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        given, identity = changes(call.body), call.path["virtual_host_id"]
        before = self._hosts.get(call.scope, identity).spec
        self._check_raw(call, raw_text(before), msgspec.structs.replace(before, **given))
        updated = await self._hosts.update(
            call.scope, identity, given, if_match=if_match(call), actor=actor(call)
        )
        view = views.virtual_host(updated, detailed=True, warnings=self._warnings(updated))
        return shown(view, updated)

    async def delete_host(self, call: ProxyCall) -> Answer[None]:
        await self._hosts.delete(
            call.scope, call.path["virtual_host_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    def _check_raw(self, call: ProxyCall, known: frozenset[tuple[str, str]], spec: VirtualHostSpec) -> None:
        """New raw text is an administrator's; what stands there already may stay."""
        if raw_text(spec) - known:
            self._access.check(call.caller, RAW, call.scope, missing="workspace")

    def _warnings(self, host: VirtualHost) -> tuple[str, ...]:
        identity = host.spec.ssl_certificate_id
        found = self._store.get(CERTIFICATE, host.scope, identity) if identity else None
        if found is None or found.status is None or not found.status.names:
            return ()
        return tuple(
            f"the certificate does not cover {name}"
            for name in host.spec.server_name.split()
            if not covered(name, found.status.names)
        )

    # Upstreams.

    async def upstreams(self, call: ProxyCall) -> Answer[Listing[views.UpstreamView]]:
        found = in_order(self._store.list(UPSTREAM, call.scope))
        return Answer(content=listing(found, paging(call.query), views.upstream))

    async def create_upstream(self, call: ProxyCall) -> Answer[views.UpstreamView]:
        body: requests.CreateUpstream = call.body
        answer = call.answering(lambda made: created(views.upstream(made), made, "upstreams"))
        return answer(await self._hosts.create_upstream(call.scope, body.spec(), actor=actor(call)))

    async def upstream(self, call: ProxyCall) -> Answer[views.UpstreamView]:
        found = self._hosts.upstream(call.scope, call.path["upstream_id"])
        return shown(views.upstream(found), found)

    async def update_upstream(self, call: ProxyCall) -> Answer[views.UpstreamView]:
        updated = await self._hosts.update_upstream(
            call.scope, call.path["upstream_id"], changes(call.body),
            if_match=if_match(call), actor=actor(call),
        )  # fmt: skip
        return shown(views.upstream(updated), updated)

    async def delete_upstream(self, call: ProxyCall) -> Answer[None]:
        await self._hosts.delete_upstream(
            call.scope, call.path["upstream_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    # Certificates.

    def _view(self, found: Certificate) -> views.CertificateView:
        return views.certificate(found, now_ns=self._clock.now_ns())

    async def certificates(self, call: ProxyCall) -> Answer[Listing[views.CertificateView]]:
        found = in_order(self._store.list(CERTIFICATE, call.scope))
        return Answer(content=listing(found, paging(call.query), self._view))

    async def request_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        body: requests.RequestCertificate = call.body
        spec = CertificateSpec(domain=body.domain.lower(), provider=body.provider, auto_renew=body.auto_renew)
        answer = call.answering(self._created_certificate)
        return answer(await self._certificates.request(call.scope, spec, actor=actor(call)))

    def _created_certificate(self, made: Certificate) -> Answer[views.CertificateView]:
        return created(self._view(made), made, "certificates")

    async def import_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        body: requests.ImportCertificate = call.body
        answer = call.answering(self._created_certificate)
        return answer(
            await self._certificates.bring(
                call.scope, body.domain, body.certificate, body.private_key, actor=actor(call)
            )
        )

    async def certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        found = self._certificates.get(call.scope, call.path["certificate_id"])
        return shown(self._view(found), found)

    async def renew_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        answer = call.answering(lambda renewed: shown(self._view(renewed), renewed))
        return answer(
            await self._certificates.renew(call.scope, call.path["certificate_id"], actor=actor(call))
        )

    async def revoke_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        body: requests.RevokeCertificate = call.body
        found = self._certificates.get(call.scope, call.path["certificate_id"])
        revoked = await self._revoker.revoke(call.scope, found.name, reason=body.reason, actor=actor(call))
        return shown(self._view(revoked), revoked)

    async def delete_certificate(self, call: ProxyCall) -> Answer[None]:
        await self._certificates.delete(
            call.scope, call.path["certificate_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    # Settings.

    async def settings(self, call: ProxyCall) -> Answer[SettingsSpec]:
        return Answer(content=self._hosts.settings(call.scope))

    async def put_settings(self, call: ProxyCall) -> Answer[SettingsSpec]:
        body: requests.PutSettings = call.body
        spec = SettingsSpec(nginx_directives=body.nginx_directives, env_vars=body.env_vars)
        written = await self._hosts.put_settings(call.scope, spec, actor=actor(call))
        return shown(written.spec, written)


def raw_text(spec: VirtualHostSpec) -> frozenset[tuple[str, str]]:
    """Every custom directive of a host and its locations."""
    found = set(spec.custom_directives.items())
    for location in spec.locations:
        found.update((location.custom_directives or {}).items())
    return frozenset(found)


def covered(name: str, names: Sequence[str]) -> bool:
    """Whether a certificate for these names is good for a server name."""
    name = name.lower().lstrip(".")
    parent = name.partition(".")[2]
    return any(name == one.lower() or one.lower() == f"*.{parent}" for one in names)

"""REST: virtual hosts, upstreams, certificates and settings of a workspace."""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.domains.proxies.access import OPERATE, RAW, READ, Access
from fleetplane.domains.proxies.agents.ports import Revoker
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    CERTIFICATE,
    DEPLOYMENT,
    UPSTREAM,
    VIRTUAL_HOST,
    Certificate,
    CertificateSpec,
    SettingsSpec,
    VirtualHost,
    agent_scope,
)
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    ProxyCall,
    Secrecy,
    actor,
    changes,
    created,
    done,
    if_match,
    shown,
)
from fleetplane.domains.proxies.rules import deployment
from fleetplane.domains.proxies.rules.configuration import CertificateUse, certificate_use
from fleetplane.domains.proxies.rules.raw_text import RawRight, host_reason
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_HOSTS = RouteGroup("Virtual hosts")
_UPSTREAMS = RouteGroup("Upstreams")
_CERTIFICATES = RouteGroup("Certificates")
_SETTINGS = RouteGroup("Settings")
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
        self._secrecy = Secrecy(access)
        self._hosts = hosts
        self._certificates = certificates

    def routes(self) -> Sequence[Route]:
        return (
            *self._host_routes(),
            *self._upstream_routes(),
            *self._certificate_routes(),
            _SETTINGS.get(f"{_OF_WORKSPACE}/settings", self.settings, READ),
            _SETTINGS.put(f"{_OF_WORKSPACE}/settings", self.put_settings, RAW, body=requests.PutSettings),
        )

    def _host_routes(self) -> Sequence[Route]:
        many, one = f"{_OF_WORKSPACE}/virtual-hosts", "/virtual-hosts/{virtual_host_id}"
        return (
            _HOSTS.get(many, self.hosts, READ, query=PAGING),
            _HOSTS.post(
                many,
                self.create_host,
                OPERATE,
                body=requests.CreateVirtualHost,
                status=CREATED,
                recheck=self._may_create_host,
            ),
            _HOSTS.get(one, self.host, READ),
            _HOSTS.patch(one, self.update_host, OPERATE, body=requests.UpdateVirtualHost),
            _HOSTS.post(f"{one}/cache/purge", self.purge_cache, OPERATE),
            _HOSTS.delete(one, self.delete_host, OPERATE, status=NO_CONTENT),
        )

    def _upstream_routes(self) -> Sequence[Route]:
        many, one = f"{_OF_WORKSPACE}/upstreams", "/upstreams/{upstream_id}"
        return (
            _UPSTREAMS.get(many, self.upstreams, READ, query=PAGING),
            _UPSTREAMS.post(
                many, self.create_upstream, OPERATE, body=requests.CreateUpstream, status=CREATED
            ),
            _UPSTREAMS.get(one, self.upstream, READ),
            _UPSTREAMS.patch(one, self.update_upstream, OPERATE, body=requests.UpdateUpstream),
            _UPSTREAMS.delete(one, self.delete_upstream, OPERATE, status=NO_CONTENT),
        )

    def _certificate_routes(self) -> Sequence[Route]:
        many, one = f"{_OF_WORKSPACE}/certificates", "/certificates/{certificate_id}"
        return (
            _CERTIFICATES.get(many, self.certificates, READ, query=PAGING),
            _CERTIFICATES.post(
                many, self.request_certificate, OPERATE, body=requests.RequestCertificate, status=CREATED
            ),
            _CERTIFICATES.post(
                f"{many}/import",
                self.import_certificate,
                OPERATE,
                body=requests.ImportCertificate,
                status=CREATED,
            ),
            _CERTIFICATES.get(f"{one}/users", self.certificate_users, READ),
            _CERTIFICATES.get(one, self.certificate, READ),
            _CERTIFICATES.post(f"{one}/renew", self.renew_certificate, OPERATE, status=202),
            _CERTIFICATES.post(
                f"{one}/revoke", self.revoke_certificate, OPERATE, body=requests.RevokeCertificate
            ),
            _CERTIFICATES.delete(one, self.delete_certificate, OPERATE, status=NO_CONTENT),
        )

    # Virtual hosts.

    async def hosts(self, call: ProxyCall) -> Answer[Listing[views.VirtualHostView]]:
        """List virtual hosts."""
        found = in_order(self._store.list(VIRTUAL_HOST, call.scope))
        return Answer(
            content=listing(
                found, paging(call.query), lambda one: self._secrecy.hosts(call, views.virtual_host(one))
            )
        )

    async def create_host(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        """Create a virtual host."""
        body: requests.CreateVirtualHost = call.body
        spec = body.spec()
        answer = call.answering(self._created_host)
        return answer(
            await self._hosts.create(call.scope, spec, actor=actor(call), raw=self._raw_right(call))
        )

    def _may_create_host(self, call: ProxyCall) -> None:
        body: requests.CreateVirtualHost = call.body
        if host_reason(None, body.spec()):
            self._access.check(call.caller, RAW, call.scope, missing="workspace")

    def _created_host(self, made: VirtualHost) -> Answer[views.VirtualHostView]:
        view = views.virtual_host(made, detailed=True, warnings=self._warnings(made))
        return created(view, made, "virtual-hosts")

    async def host(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        """Get a virtual host."""
        found = self._hosts.get(call.scope, call.path["virtual_host_id"])
        view = views.virtual_host(found, detailed=True, set_aside=self._set_aside(found))
        return shown(self._secrecy.hosts(call, view), found)

    def _set_aside(self, host: VirtualHost) -> tuple[views.SetAsideView, ...]:
        """The agents of which the last version is not in service, or not with this host, because of it."""
        told = []
        for agent in self._store.list(AGENT, host.scope):
            found = self._store.list(DEPLOYMENT, agent_scope(agent.scope, agent.name))
            if found and found[-1].status is not None:
                error = deployment.host_error(found[-1].status, host.name)
                if error:
                    told.append(
                        views.SetAsideView(agent_id=agent.name, version=found[-1].spec.version, error=error)
                    )
        return tuple(told)

    async def update_host(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        """Change a virtual host."""
        given, identity = changes(call.body), call.path["virtual_host_id"]
        updated = await self._hosts.update(
            call.scope,
            identity,
            given,
            if_match=if_match(call),
            actor=actor(call),
            raw=self._raw_right(call),
        )
        view = views.virtual_host(updated, detailed=True, warnings=self._warnings(updated))
        return shown(view, updated)

    async def purge_cache(self, call: ProxyCall) -> Answer[views.VirtualHostView]:
        """Forget every answer that agents keep of a virtual host."""
        purged = await self._hosts.purge(call.scope, call.path["virtual_host_id"], actor=actor(call))
        view = views.virtual_host(purged, detailed=True, warnings=self._warnings(purged))
        return shown(view, purged)

    async def delete_host(self, call: ProxyCall) -> Answer[None]:
        """Delete a virtual host."""
        await self._hosts.delete(
            call.scope,
            call.path["virtual_host_id"],
            if_match=if_match(call),
            actor=actor(call),
            raw=self._raw_right(call),
        )
        return done()

    def _raw_right(self, call: ProxyCall) -> RawRight:
        return self._access.raw_right(call.caller, call.scope)

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
        """List upstreams."""
        found = in_order(self._store.list(UPSTREAM, call.scope))
        return Answer(content=listing(found, paging(call.query), views.upstream))

    async def create_upstream(self, call: ProxyCall) -> Answer[views.UpstreamView]:
        """Create an upstream."""
        body: requests.CreateUpstream = call.body
        answer = call.answering(lambda made: created(views.upstream(made), made, "upstreams"))
        return answer(await self._hosts.upstreams.create(call.scope, body.spec(), actor=actor(call)))

    async def upstream(self, call: ProxyCall) -> Answer[views.UpstreamView]:
        """Get an upstream."""
        found = self._hosts.upstreams.get(call.scope, call.path["upstream_id"])
        return shown(views.upstream(found), found)

    async def update_upstream(self, call: ProxyCall) -> Answer[views.UpstreamView]:
        """Change an upstream."""
        updated = await self._hosts.upstreams.update(
            call.scope,
            call.path["upstream_id"],
            changes(call.body),
            if_match=if_match(call),
            actor=actor(call),
        )
        return shown(views.upstream(updated), updated)

    async def delete_upstream(self, call: ProxyCall) -> Answer[None]:
        """Delete an upstream."""
        await self._hosts.upstreams.delete(
            call.scope, call.path["upstream_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    # Certificates.

    def _view(self, found: Certificate) -> views.CertificateView:
        return views.certificate(found, now_ns=self._clock.now_ns())

    async def certificates(self, call: ProxyCall) -> Answer[Listing[views.CertificateView]]:
        """List certificates."""
        found = in_order(self._store.list(CERTIFICATE, call.scope))
        return Answer(content=listing(found, paging(call.query), self._view))

    async def request_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Request a certificate; it is pending until it has been issued."""
        body: requests.RequestCertificate = call.body
        spec = CertificateSpec(domain=body.domain.lower(), provider=body.provider, auto_renew=body.auto_renew)
        answer = call.answering(self._created_certificate)
        return answer(await self._certificates.request(call.scope, spec, actor=actor(call)))

    def _created_certificate(self, made: Certificate) -> Answer[views.CertificateView]:
        return created(self._view(made), made, "certificates")

    async def import_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Import a certificate and its key."""
        body: requests.ImportCertificate = call.body
        answer = call.answering(self._created_certificate)
        return answer(
            await self._certificates.bring(
                call.scope, body.domain, body.certificate, body.private_key, actor=actor(call)
            )
        )

    async def certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Get a certificate."""
        found = self._certificates.get(call.scope, call.path["certificate_id"])
        return shown(self._view(found), found)

    async def certificate_users(self, call: ProxyCall) -> Answer[CertificateUse]:
        """Get what uses a certificate, and which agents have its key."""
        scope, identity = call.scope, call.path["certificate_id"]
        self._certificates.get(scope, identity)
        return Answer(
            content=certificate_use(
                identity,
                {one.name: one.spec for one in self._store.list(VIRTUAL_HOST, scope)},
                {one.name: one.spec for one in self._store.list(UPSTREAM, scope)},
                {one.name: one.spec.labels for one in self._store.list(AGENT, scope)},
            )
        )

    async def renew_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Renew a certificate now."""
        answer = call.answering(lambda renewed: shown(self._view(renewed), renewed))
        return answer(
            await self._certificates.renew(call.scope, call.path["certificate_id"], actor=actor(call))
        )

    async def revoke_certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Revoke a certificate at its issuer."""
        body: requests.RevokeCertificate = call.body
        found = self._certificates.get(call.scope, call.path["certificate_id"])
        revoked = await self._revoker.revoke(call.scope, found.name, reason=body.reason, actor=actor(call))
        return shown(self._view(revoked), revoked)

    async def delete_certificate(self, call: ProxyCall) -> Answer[None]:
        """Delete a certificate."""
        await self._certificates.delete(
            call.scope, call.path["certificate_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    # Settings.

    async def settings(self, call: ProxyCall) -> Answer[SettingsSpec]:
        """Get the global settings."""
        return Answer(content=self._secrecy.settings(call, self._hosts.settings(call.scope)))

    async def put_settings(self, call: ProxyCall) -> Answer[SettingsSpec]:
        """Replace the global settings."""
        body: requests.PutSettings = call.body
        spec = SettingsSpec(nginx_directives=body.nginx_directives, env_vars=body.env_vars)
        written = await self._hosts.put_settings(
            call.scope, spec, actor=actor(call), raw=self._raw_right(call)
        )
        return shown(written.spec, written)


def covered(name: str, names: Sequence[str]) -> bool:
    """Whether a certificate for these names is good for a server name."""
    name = name.lower().lstrip(".")
    parent = name.partition(".")[2]
    return any(name == one.lower() or one.lower() == f"*.{parent}" for one in names)

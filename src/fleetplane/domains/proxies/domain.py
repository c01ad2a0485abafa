"""The domain `proxies`, as the rest of the house sees it before it is loaded."""

from __future__ import annotations

from fleetplane.domains.declaration import Declaration, Listener, Transport, Verb

DOMAIN = Declaration(
    name="proxies",
    summary="NGINX fleets: REST, gRPC, WebSocket, certificates",
    order=30,
    settings="fleetplane.domains.proxies.settings:ProxySettings",
    server="fleetplane.domains.proxies.server:BLUEPRINT",
    build="fleetplane.domains.proxies.build:build",
    listeners=(
        Listener(
            name="proxy-agents",
            settings="fleetplane.domains.proxies.settings:ProxyAgentsSettings",
            transport=Transport(
                tls="setting", client_certificates="optional", plaintext_setting="allow_plaintext"
            ),
        ),
    ),
    verbs=(
        Verb(
            name="proxies",
            target="fleetplane.domains.proxies.cli.proxies:proxies",
            help="NGINX fleets: agents, and commands on many of them.",
        ),
    ),
    agents=(
        Verb(
            name="proxy",
            target="fleetplane.domains.proxies.cli.agent:proxy",
            help="Drive this machine's NGINX as the server wants it served.",
        ),
    ),
    client_variables=("FLEETPLANE_PROXY_*",),
)

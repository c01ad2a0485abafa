"""The domain `edge`, as the rest of the house sees it before it is loaded."""

from __future__ import annotations

from fleetplane.domains.declaration import Declaration, Listener, Runner, Transport, Verb

DOMAIN = Declaration(
    name="edge",
    summary="daemons behind NAT: signed streams, tools run on one or on thousands",
    order=50,
    settings="fleetplane.domains.edge.settings:EdgeSettings",
    server="fleetplane.domains.edge.server:BLUEPRINT",
    build="fleetplane.domains.edge.server:build",
    listeners=(
        Listener(
            name="edge",
            settings="fleetplane.domains.edge.settings:EdgeListenerSettings",
            transport=Transport(tls="setting", plaintext_setting="allow_remote_plaintext"),
        ),
    ),
    verbs=(
        Verb(
            name="edge",
            target="fleetplane.domains.edge.cli.edge:edge",
            help="Daemons behind NAT, and runs across them.",
        ),
    ),
    runners=(
        Runner(
            kinds=("edge-nodes", "edge-node", "edge", "en", "edge-group", "edge-groups", "eg"),
            target="fleetplane.domains.edge.cli.runs:run_fleet",
        ),
    ),
    agents=(
        Verb(
            name="edge",
            target="fleetplane.domains.edge.cli.agent:edge",
            help="Serve this machine from behind NAT: run tools as its owner allows.",
        ),
    ),
    client_variables=("FLEETPLANE_EDGE_AGENT_*", "FLEETPLANE_EDGE_EXIT_CODES"),
)

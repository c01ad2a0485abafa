"""The domain `instances`, as the rest of the house sees it before it is loaded."""

from __future__ import annotations

from fleetplane.domains.declaration import Declaration, Listener, Transport, Verb

DOMAIN = Declaration(
    name="instances",
    summary="groups of machines: registration, certificates, files, drain, replacement",
    order=20,
    settings="fleetplane.domains.instances.settings:InstanceSettings",
    server="fleetplane.domains.instances.server:BLUEPRINT",
    build="fleetplane.domains.instances.build:build",
    listeners=(
        Listener(
            name="registration",
            settings="fleetplane.domains.instances.settings:RegistrationSettings",
            transport=Transport(tls="always", tls13_only=True),
        ),
        Listener(
            name="operator",
            settings="fleetplane.domains.instances.settings:OperatorSettings",
            transport=Transport(
                tls="always", client_certificates="required", tokens_setting="tokens", tls13_only=True
            ),
        ),
        Listener(
            name="agent",
            settings="fleetplane.domains.instances.settings:AgentSettings",
            transport=Transport(tls="always", client_certificates="required", tls13_only=True),
        ),
    ),
    verbs=(
        Verb(
            name="instances",
            target="fleetplane.domains.instances.cli.instances:instances",
            help="Groups of machines: scale, watch, drain, freeze.",
        ),
    ),
    explain_key="fleetplane.domains.instances.cli.admin:explain_key",
    agents=(
        Verb(
            name="instance",
            target="fleetplane.domains.instances.cli.agent:instance",
            help="Serve this instance: register it, report its health, receive its files.",
        ),
    ),
)

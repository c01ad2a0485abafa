"""The domain `gpus`, as the rest of the house sees it before it is loaded."""

from __future__ import annotations

from fleetplane.domains.declaration import Declaration, Listener, Transport, Verb

OPERATOR_PROVIDER = "fleetplane-cli"
"""The provider that `fleetplane gpus` writes as by default: what a person says has no lease."""

DOMAIN = Declaration(
    name="gpus",
    summary="GPU health as resources: providers write, consumers watch",
    order=10,
    settings="fleetplane.domains.gpus.settings:GpuSettings",
    server="fleetplane.domains.gpus.server:BLUEPRINT",
    build="fleetplane.domains.gpus.server:build",
    listeners=(
        Listener(
            name="device-api",
            settings="fleetplane.domains.gpus.settings:DeviceApiSettings",
            transport=Transport(
                tls="never",
                plaintext_setting="allow_remote_plaintext",
                unix_mode_setting="socket_mode",
                default_socket="/var/run/device-api/device.sock",
            ),
        ),
    ),
    verbs=(
        Verb(
            name="gpus",
            target="fleetplane.domains.gpus.cli.gpus:gpus",
            help="Read, watch and report GPU health.",
        ),
    ),
    agents=(
        Verb(
            name="gpu", target="fleetplane.domains.gpus.cli.agent:gpu", help="Report this node's NVIDIA GPUs."
        ),
    ),
    client_variables=("FLEETPLANE_DEVICE_API",),
)

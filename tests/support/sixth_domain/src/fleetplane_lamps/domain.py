"""The domain `lamps`, as Fleetplane sees it before it is loaded."""

from __future__ import annotations

from fleetplane.domains.declaration import Declaration, Listener, Transport, Verb

DOMAIN = Declaration(
    name="lamps",
    summary="lamps that say whether they are lit",
    settings="fleetplane_lamps.settings:LampSettings",
    server="fleetplane_lamps.server:BLUEPRINT",
    build="fleetplane_lamps.server:build",
    listeners=(
        Listener(
            name="lamps",
            settings="fleetplane_lamps.settings:LampListenerSettings",
            transport=Transport(tls="never"),
        ),
    ),
    verbs=(Verb(name="lamps", target="fleetplane_lamps.cli:lamps", help="Lamps, and whether they are lit."),),
    agents=(Verb(name="lamp", target="fleetplane_lamps.cli:lamp", help="Report a lamp of this machine."),),
)

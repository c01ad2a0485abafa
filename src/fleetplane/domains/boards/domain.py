"""The domain `boards`, as the rest of the house sees it before it is loaded."""

from __future__ import annotations

from fleetplane.domains.declaration import Declaration, Listener, Runner, Transport, Verb

DOMAIN = Declaration(
    name="boards",
    summary="Raspberry-Pi-class boards: metrics, GPIO, programs, logs, k3s over SSH",
    order=40,
    settings="fleetplane.domains.boards.settings:BoardSettings",
    server="fleetplane.domains.boards.server:BLUEPRINT",
    build="fleetplane.domains.boards.server:build",
    listeners=(
        Listener(
            name="boards",
            settings="fleetplane.domains.boards.settings:BoardsListenerSettings",
            transport=Transport(tls="always", client_certificates="optional"),
        ),
        Listener(
            name="boards-plain",
            settings="fleetplane.domains.boards.settings:PlainBoardsSettings",
            transport=Transport(tls="never", plaintext_setting="allow_remote"),
        ),
    ),
    verbs=(
        Verb(
            name="boards",
            target="fleetplane.domains.boards.cli.boards:boards",
            help="Raspberry-Pi-class boards: metrics, GPIO, commands, logs, provisioning.",
        ),
    ),
    runners=(
        Runner(
            kinds=("boards", "board", "b"),
            target="fleetplane.domains.boards.cli.commands:run_fleet",
        ),
    ),
    agents=(
        Verb(
            name="board",
            target="fleetplane.domains.boards.cli.agent:board",
            help="Serve this board: its pins, metrics, logs and diagnostics.",
        ),
    ),
    client_variables=("FLEETPLANE_BOARD_AGENT_*",),
)

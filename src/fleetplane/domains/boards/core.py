"""What the parts of the boards domain share: one of each, built once, in the order of who needs whom."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from fleetplane import __version__
from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.boards.approvals import Approvals
from fleetplane.domains.boards.ca_rules import DOMAINS
from fleetplane.domains.boards.callers import Callers
from fleetplane.domains.boards.certificates import Certificates
from fleetplane.domains.boards.clusters import Clusters
from fleetplane.domains.boards.controller import BoardController, BoardPolicy
from fleetplane.domains.boards.identity import CERTIFICATE_DAYS, Enrolment
from fleetplane.domains.boards.node_service import NodeView
from fleetplane.domains.boards.presence import Presence
from fleetplane.domains.boards.registry import Boards
from fleetplane.domains.boards.tokens import JoinTokens
from fleetplane.kernel.sessions import Sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    heartbeat_seconds: float = 30.0
    certificate_days: float = CERTIFICATE_DAYS
    agent_port: int = 9091
    """Where a board's agent listens if it did not say."""
    plain: bool = False
    """Serve agents that know no TLS, on a listener of their own."""
    controller_id: str = ""
    """How this server is called among others; empty for the machine's name."""
    unprotected_pins: frozenset[int] = frozenset()
    """Pins that are protected on every board, and may be used all the same."""
    certificate_domains: tuple[str, ...] = DOMAINS
    """Under which servers' names may be certified."""
    server_names: tuple[str, ...] = ()
    """At which boards dial this server, beside those it is bound to."""
    requests_per_minute: int = 1000
    """Per caller of REST."""
    version: str = __version__

    @property
    def own_name(self) -> str:
        return self.controller_id or socket.gethostname()


class BoardCore:
    def __init__(self, kernel: Kernel, options: BoardOptions) -> None:
        store, clock = kernel.store, kernel.clock
        self.kernel = kernel
        self.options = options
        self.boards = Boards(store)
        self.clusters = Clusters(store)
        self.certificates = Certificates(store, kernel.revocations)
        self.join_tokens = JoinTokens(store, kernel.authority, clock)
        self.approvals = Approvals(store)
        self.presence = Presence()
        self.callers = Callers(self.boards, self.presence)
        self.view = NodeView(self.presence)
        self.sessions = Sessions(kernel.revocations)
        self.enrolment = Enrolment(
            store,
            self.boards,
            kernel.authority,
            self.join_tokens,
            self.certificates,
            certificate_days=options.certificate_days,
        )
        self.controller = BoardController(
            store=store,
            clock=clock,
            boards=self.boards,
            presence=self.presence,
            approvals=self.approvals,
            join_tokens=self.join_tokens,
            policy=BoardPolicy(heartbeat_seconds=options.heartbeat_seconds),
        )

    def __repr__(self) -> str:
        return f"<BoardCore {self.boards!r} {self.presence!r}>"

"""What the parts of the boards domain share: one of each, built once, in the order of who needs whom."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fleetplane import __version__
from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.boards.ca.issued import IssuedCertificates
from fleetplane.domains.boards.ca.rules import DOMAINS
from fleetplane.domains.boards.grpc.nodes import Callers, NodeView
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.inventory.last_seen import BoardPresence, ServiceReports
from fleetplane.domains.boards.inventory.liveness import BoardController, BoardPolicy
from fleetplane.domains.boards.joining.enrolment import CERTIFICATE_DAYS, BoardEnrolment
from fleetplane.domains.boards.joining.join_tokens import Approvals, JoinTokens
from fleetplane.domains.boards.kinds import number_of
from fleetplane.domains.boards.pins.devices import Devices, guard_boards
from fleetplane.domains.boards.provisioning.policy import ProvisioningPolicy
from fleetplane.domains.boards.sets.delivery import BoardSets
from fleetplane.domains.boards.wire import pins as gpio_wire
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.identity.revocation_lists import AcceptingAgent, RevocationLists
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.sessions import Sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOptions:
    heartbeat_seconds: float = 30.0
    certificate_days: float = CERTIFICATE_DAYS
    agent_port: int = 9091
    """The port of a board's agent that did not report one."""
    plain: bool = False
    """Serve agents that know no TLS, on a listener of their own."""
    plain_boards: int = 100
    """Boards without a certificate that are let in there."""
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
    provisioning: ProvisioningPolicy = field(default_factory=ProvisioningPolicy)
    """What orders to provision may name."""
    version: str = __version__

    @property
    def own_name(self) -> str:
        return self.controller_id or socket.gethostname()


class BoardCore:
    def __init__(self, kernel: Kernel, options: BoardOptions) -> None:
        store, clock = kernel.store, kernel.clock
        self.kernel = kernel
        self.options = options
        self.boards = Boards(store, deletion_guards=(guard_boards,))
        self.devices = Devices(store, clock, unprotected=options.unprotected_pins)
        self.clusters = Clusters(store)
        self.certificates = IssuedCertificates(store, kernel.revocations)
        self.sets = BoardSets(store, clock, self._cluster_names)
        self.join_tokens = JoinTokens(store, kernel.authority, clock)
        self.approvals = Approvals(store)
        self.presence = BoardPresence()
        self.service_reports = ServiceReports(store)
        self.callers = Callers(self.boards, self.presence)
        self.view = NodeView(self.presence, self._devices_of)
        self.sessions = Sessions(kernel.revocations)
        self.revocation_lists = kernel.revocation_lists or RevocationLists(store, kernel.authority, clock)
        self.revocation_lists.expect(self._callers)
        self.enrolment = BoardEnrolment(
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
            attention=kernel.attention,
            heard=LastSeen(store, clock, channel="boards") if store.shared else None,
        )

    def _cluster_names(self) -> dict[int, str]:
        return {number_of(cluster): cluster.spec.name for cluster in self.clusters.all()}

    def _callers(self) -> Iterator[AcceptingAgent]:
        """Boards whose agents accept callers: every one that came by itself."""
        for board in self.boards.all():
            status = status_of(board)
            if status.registered_at_ns is not None:
                yield AcceptingAgent(
                    agent=f"board/{board.name}", name=board.spec.name, able=not status.speaks_original
                )

    def _devices_of(self, board: int) -> Iterable[pi.GPIODevice]:
        return [
            gpio_wire.device(device) for device in self.devices.of_board(board) if not device.spec.removing
        ]

    def __repr__(self) -> str:
        return f"<BoardCore {self.boards!r} {self.presence!r}>"

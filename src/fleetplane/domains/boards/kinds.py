"""What the boards domain keeps, where, and who writes it.

Everything lies in one scope, `boards`; boards, clusters and certificates are named by their
numbers, which are counted up and never used again. Claims of the kind `board` in that scope:
`name`, `mac` and `serial`, each held by the board's number; of `board-cluster`: `name`; of
`board-join-token`: `digest`, held by the token's own name. A claim ends with its owner, so the
name of something deleted may be used again.

A board's state is not set as a word. Three sides speak about it (the server and its operators,
the board itself, and its silence), each in a field of its own, and `rules.state_of` makes one word of
them. Reports are not stored: they move liveness, and only what follows from them is written.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fleetplane.kernel.resources import Kind, Nothing, Resource

SCOPE = "boards"
NUMBER_LIMIT = 2**32 - 1
"""Numbers travel as uint32."""


def board_scope(number: int) -> str:
    """Where a freeze of one board lies."""
    return f"{SCOPE}/board/{number}"


class BoardState(StrEnum):
    DISCOVERED = "discovered"
    PROVISIONING = "provisioning"
    READY = "ready"
    NOT_READY = "not_ready"
    MAINTENANCE = "maintenance"
    FAILED = "failed"
    UNKNOWN = "unknown"


class BoardRole(StrEnum):
    MASTER = "master"
    WORKER = "worker"


class BoardSilence(StrEnum):
    """How long nothing was heard."""

    NONE = "none"
    STALE = "stale"
    """Three reports are missing."""
    DEAD = "dead"
    """Ten reports are missing."""


class ClusterState(StrEnum):
    PENDING = "pending"
    PROVISIONING = "provisioning"
    ACTIVE = "active"
    DEGRADED = "degraded"
    MAINTENANCE = "maintenance"
    FAILED = "failed"


class BoardsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields may be added later: what is stored keeps field names, and new fields have defaults."""


class BoardSpec(BoardsSpec, frozen=True):
    """What the board is, by its own word and its operators'."""

    name: str
    role: BoardRole = BoardRole.WORKER
    ip_address: str = ""
    """As reported by the board or entered by a person."""
    confirmed_address: str = ""
    """Confirmed by a person only; provisioning connects to it."""
    ssh_host_keys: tuple[str, ...] = ()
    """Its SSH host's public keys as it gave them when it joined; later reports do not change them."""
    mac_address: str = ""
    """Lower case, with colons."""
    architecture: str = ""
    model: str = ""
    serial_number: str = ""
    cpu_cores: int = 0
    memory_bytes: int = 0
    cluster_id: int | None = None
    kube_version: str = ""
    node_name: str = ""
    """As the cluster calls it."""
    os_version: str = ""
    kernel_version: str = ""


class AgentDialect(StrEnum):
    """Which methods a board's agent knows. How it is reached, with TLS or without, is another matter."""

    ORIGINAL = "original"
    FLEETPLANE = "fleetplane"


class BoardStatus(BoardsSpec, frozen=True):
    state: BoardState
    """Derived from the next three fields, so that watchers need not know the rule."""
    declared: BoardState = BoardState.READY
    """By the server, its operators or provisioning."""
    reported: BoardState | None = None
    """By the board; None while it has nothing to say against what was declared."""
    silence: BoardSilence = BoardSilence.NONE
    unheard: bool = False
    """Not heard since the server began to judge, which may have been away for longer than the board."""
    registration_state: BoardState = BoardState.READY
    """The state that the board received at its registration: some agents repeat it for ever."""
    previous_state: BoardState | None = None
    state_changed_at_ns: int = 0
    """Equal to the resource's `updated_at_ns` if this very version is the news."""
    registered_at_ns: int | None = None
    """When an agent first came; None for a board that was only written down."""
    last_seen_at_ns: int | None = None
    """As of this write; newer sightings are in memory."""
    agent_version: str = ""
    capabilities: tuple[str, ...] = ()
    address: str = ""
    """Where its agent can be reached."""
    port: int = 0
    plaintext: bool = False
    """Its agent knows no TLS: it came through the listener for such."""
    dialect: AgentDialect | None = None
    """As its agent registered; None in records from before this was written down."""
    arrivals: int = 0
    """How often its agent has registered; by this the server that calls boards learns of it."""
    boot_id: str = ""
    sequence: int = 0
    """Of the last report before this write."""
    key_digest: str = ""
    """SHA-256 of its public key; empty for a board that has no certificate of ours."""
    certificate_serial: str = ""
    """In hexadecimal."""
    certificate_expires_at_ns: int | None = None

    @property
    def speaks_original(self) -> bool:
        """Whether its agent knows the methods of original agents only."""
        if self.dialect is None:  # until it registers again: then, only original agents came without TLS
            return self.plaintext
        return self.dialect is AgentDialect.ORIGINAL


class ClusterSpec(BoardsSpec, frozen=True):
    name: str
    description: str = ""
    version: str = ""
    master_endpoint: str = ""
    named_at_ns: int = 0
    """When it got its name; 0: when it was made."""


class ClusterStatus(BoardsSpec, frozen=True):
    state: ClusterState = ClusterState.PENDING


class Counter(BoardsSpec, frozen=True):
    """The last number given out; named by what is numbered."""

    last: int = 0


class TokenPurpose(StrEnum):
    BOARD = "board"
    CONTROLLER = "controller"
    """For another server, which is no board."""


class JoinTokenSpec(BoardsSpec, frozen=True):
    """What a join token lets in. The token itself is kept as a digest only."""

    digest: str
    expires_at_ns: int
    created_by: str
    purpose: TokenPurpose = TokenPurpose.BOARD
    board_name: str = ""
    """The name that must be registered; empty for any."""
    role: BoardRole | None = None
    cluster_id: int | None = None
    replaces: int | None = None
    """A board whose lost key may be replaced with this token, without asking anyone again."""


class JoinTokenStatus(BoardsSpec, frozen=True):
    used_at_ns: int
    used_by: str
    """The principal that it let in."""


class ApprovalState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"


class ApprovalSpec(BoardsSpec, frozen=True):
    """A key that asks to take a known board's place; named by the board's number and the key."""

    board: int
    key_digest: str
    board_name: str
    serial_number: str = ""
    mac_address: str = ""
    address: str = ""
    """Where the request came from."""
    requested_at_ns: int = 0


class ApprovalStatus(BoardsSpec, frozen=True):
    state: ApprovalState
    decided_by: str = ""
    decided_at_ns: int = 0


class BoardCertificateSpec(BoardsSpec, frozen=True):
    """A certificate that was issued; never changes."""

    serial: str
    """In hexadecimal: serials are longer than any integer that is stored."""
    common_name: str
    subject: str
    issuer: str
    pem: str
    not_before_ns: int
    not_after_ns: int
    purpose: str = "client"
    """`ca`, `server`, `client`, `ssh` or `intermediate`."""
    sans: tuple[str, ...] = ()
    key_usage: tuple[str, ...] = ()
    ext_key_usage: tuple[str, ...] = ()
    board: int | None = None
    cluster_id: int | None = None
    auto_renew: bool = False


class BoardCertificateStatus(BoardsSpec, frozen=True):
    revoked_at_ns: int | None = None
    revoked_reason: str = ""


Board = Resource[BoardSpec, BoardStatus]
Cluster = Resource[ClusterSpec, ClusterStatus]
JoinToken = Resource[JoinTokenSpec, JoinTokenStatus]
Approval = Resource[ApprovalSpec, ApprovalStatus]
Certificate = Resource[BoardCertificateSpec, BoardCertificateStatus]

BOARD: Kind[BoardSpec, BoardStatus] = Kind("board", BoardSpec, BoardStatus)
CLUSTER: Kind[ClusterSpec, ClusterStatus] = Kind("board-cluster", ClusterSpec, ClusterStatus)
COUNTER: Kind[Counter, Nothing] = Kind("board-counter", Counter, Nothing)
JOIN_TOKEN: Kind[JoinTokenSpec, JoinTokenStatus] = Kind("board-join-token", JoinTokenSpec, JoinTokenStatus)
APPROVAL: Kind[ApprovalSpec, ApprovalStatus] = Kind("board-approval", ApprovalSpec, ApprovalStatus)
CERTIFICATE: Kind[BoardCertificateSpec, BoardCertificateStatus] = Kind(
    "board-certificate", BoardCertificateSpec, BoardCertificateStatus
)

KINDS = (BOARD, CLUSTER, COUNTER, JOIN_TOKEN, APPROVAL, CERTIFICATE)


def number_of(resource: Board | Cluster | Certificate) -> int:
    return int(resource.name)

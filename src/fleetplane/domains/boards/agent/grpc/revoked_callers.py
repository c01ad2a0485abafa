"""Who may no longer come in at this node, as the server's signed list says.

The list is kept on disk, so that it holds after a restart without the server. A list that is not signed by
the authority that this node joined, or older than the one that holds, changes nothing. If what is on disk
cannot be believed, only the server is let in until it has sent another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog
from cryptography import x509

from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, Unauthenticated
from fleetplane.kernel.revocation_list import SIZE_LIMIT_BYTES, RevocationList, opened


@dataclass(slots=True)
class RevokedCallers:
    folder: BoardIdentityFolder
    log: structlog.typing.FilteringBoundLogger
    number: int = 0
    """Of the list that holds; 0 for none."""
    _serials: frozenset[str] = field(default=frozenset(), repr=False)
    _principals: frozenset[str] = field(default=frozenset(), repr=False)
    _closed: bool = False
    """Only the server is admitted, because the list of revocations is unknown."""

    def check(self, *, principal: str, serial: str, is_server: bool) -> None:
        """Raise `Unauthenticated` for a caller who was revoked; `serial` in hexadecimal."""
        if serial in self._serials or principal in self._principals:
            raise Unauthenticated(
                f"{principal} was revoked", hint="ask for another certificate", details={"cause": "revoked"}
            )
        if self._closed and not is_server:
            raise Unauthenticated(
                "this node does not know who was revoked, and lets in its server only",
                hint="go through the server",
                details={"cause": "revocations unknown"},
            )

    def load(self) -> None:
        """Take up what is on disk. Blocking."""
        try:
            with self.folder.revocations.open("rb") as file:
                packed = file.read(SIZE_LIMIT_BYTES + 1)
        except FileNotFoundError:
            return  # none was received yet
        except OSError as error:
            self._distrust(str(error))
            return
        try:
            self._use(opened(packed, self._authorities()))
        except FleetplaneError as error:
            self._distrust(error.message)

    def take(self, packed: bytes) -> bool:
        """Take up a list that the server sent; whether it holds now. Blocking."""
        try:
            found = opened(packed, self._authorities())
            if found.number < self.number:
                raise IntegrityError(f"list {found.number} is older than {self.number}, which holds")
        except FleetplaneError as error:
            self.log.error("revocations.refused", error=error.message, number=self.number)
            return False
        self.folder.write(self.folder.revocations, packed)
        self._use(found)
        self.log.info("revocations.taken", number=self.number, entries=len(self._serials | self._principals))
        return True

    def _use(self, found: RevocationList) -> None:
        self._serials, self._principals = frozenset(found.serials), frozenset(found.principals)
        self._closed = not found.complete
        self.number = found.number  # last: the loop reports it as the list that holds, from another thread

    def _distrust(self, reason: str) -> None:
        self._closed = True
        self.log.error("revocations.unreadable", file=str(self.folder.revocations), error=reason)

    def _authorities(self) -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates(self.folder.credentials().authority_pem)

"""Who asks for releases of the GPUs' agent: whoever may write at the node's socket, by its provider id."""

from __future__ import annotations

import re
from typing import Any

from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, Needs

LISTENER = "device-api"
WRITE = Permission("gpus.write")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def check_provider(provider_id: str, *, field: str) -> None:
    """Refuse ids that nothing can be stored under."""
    if _NAME.fullmatch(provider_id) is None:
        raise InvalidArgument(f"{provider_id[:80]!r} is not the id of a provider", field=field)


class ProviderRegister:
    """Every provider at the socket is trusted alike: the mode of the socket says who may be one."""

    def recognise(self, context: CallContext, name: str) -> str:
        """The provider's id; none is needed to fetch a file."""
        if name or context.method.endswith("/CheckIn"):
            check_provider(name, field="name")
        return name

    def card(self, agent: str) -> AgentCard | None:
        """A provider is known as long as its record is there."""
        return AgentCard(title=agent)


def _register(_domain: Any, _store: Store) -> ProviderRegister:
    return ProviderRegister()


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.SOCKET,
    permission=WRITE,
    register=_register,
    needs=Needs.WRITES,
)

"""Users of proxies, as accounts."""

from __future__ import annotations

from fleetplane.domains.proxies.kinds.records import USER, User
from fleetplane.fleet.resources.common import AccountSpecView, AccountStatusView, account_resource
from fleetplane.fleet.resources.declaration import ResourceView, Secret, ViewReader


def user_view(user: User, _reading: ViewReader) -> ResourceView[AccountSpecView, AccountStatusView]:
    """What is shown of a user of proxies; roles are held in organisations."""
    spec = user.spec
    return ResourceView(
        spec=AccountSpecView(
            domain="proxies",
            email=spec.email,
            display_name=spec.name,
            roles=("proxies.system_admin",) if spec.is_system_admin else (),
            active=not spec.disabled,
            password=Secret(set=True),
        ),
        status=AccountStatusView(last_login_at=None),
    )


ACCOUNTS = account_resource(
    USER,
    view=user_view,
    named=lambda user, _reading: user.spec.email,
    shows=lambda user: not user.spec.is_adopted,
)

"""Access lists, certificates and settings of workspaces: objects that people write through the resource API.

No document carries a password or a private key. A user of a list without a password is refused until one is
set, and a certificate whose owner brings it waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.desired.common import (
    ProxyParts,
    batch_of,
    certificates_called,
    place_of,
    raw_right,
    reloads,
    required_place,
)
from fleetplane.domains.proxies.kinds.passwords import list_locked, list_with_known_passwords, locked_users
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    CERTIFICATE,
    SETTINGS,
    SETTINGS_NAME,
    AccessList,
    AccessListSpec,
    Certificate,
    CertificateSpec,
    SettingsSpec,
    WorkspaceSettings,
)
from fleetplane.domains.proxies.kinds.unique import refuse
from fleetplane.domains.proxies.resources.certificates import ProxyCertificateSpecView
from fleetplane.domains.proxies.resources.places import place
from fleetplane.domains.proxies.serving.certificates import IMPORTED
from fleetplane.domains.proxies.typed_options import Access, AccessRule, BasicUser
from fleetplane.fleet.masking import masked_values, with_known_secrets, without_secrets
from fleetplane.fleet.resources.common import NoStatus
from fleetplane.fleet.resources.declaration import (
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    Secret,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.store import Draft

_NAME = "name"

# Access lists.


class AccessListRuleView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    action: str
    """`allow` or `deny`."""
    network: str
    """An address, a network, or `all`."""


class AccessListUserView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    name: str
    password: Secret = Secret(set=False)
    """Set through the proxies' own API, never here."""


class AccessListSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    rules: tuple[AccessListRuleView, ...] = ()
    banned: tuple[str, ...] = ()
    """Networks that are refused whatever the rules say."""
    users: tuple[AccessListUserView, ...] = ()


def list_view(found: AccessList, _reading: ViewReader) -> ResourceView[AccessListSpecView, NoStatus]:
    """What is shown of a list; of its users' passwords, whether there are any."""
    spec = found.spec
    barred = set(locked_users(Access(users=spec.users)))
    return ResourceView(
        spec=AccessListSpecView(
            rules=tuple(AccessListRuleView(action=one.action, network=one.network) for one in spec.rules),
            banned=spec.banned,
            users=tuple(
                AccessListUserView(name=one.name, password=Secret(set=one.name not in barred))
                for one in spec.users
            ),
        ),
        status=None,
    )


def find_list(_domain: object, draft: Draft, scope: str, name: str) -> AccessList | None:
    """By its name."""
    at = place_of(draft, scope)
    found = None if at is None else draft.claimed_by(ACCESS_LIST, at, _NAME, name)
    return None if at is None or found is None else draft.get(ACCESS_LIST, at, found)


def put_list(call: WriteCall) -> AccessList:
    """Create a list, or replace it; users that were there keep their passwords."""
    domain: ProxyParts = call.domain
    given: AccessListSpecView = call.spec
    scope, stored = required_place(call), call.stored
    spec = AccessListSpec(
        name=call.name,
        rules=tuple(
            AccessRule(action=_action(one.action, number), network=one.network)
            for number, one in enumerate(given.rules)
        ),
        banned=given.banned,
        users=tuple(BasicUser(name=one.name) for one in given.users),
    )
    if stored is not None:
        spec = list_with_known_passwords(spec, stored.spec)
    identity = call.new_id() if stored is None else stored.name
    return domain.access_lists.put_in(batch_of(call), scope, identity, list_locked(spec))


def _action(word: str, number: int) -> Any:
    if word not in ("allow", "deny"):
        raise InvalidArgument(f"must be allow or deny, not {word[:20]!r}", field=f"rules.{number}.action")
    return word


def delete_list(call: WriteCall) -> None:
    """Delete a list that no virtual host refers to."""
    domain: ProxyParts = call.domain
    assert call.stored is not None
    domain.access_lists.delete_in(batch_of(call), call.stored)


def list_warnings(made: AccessList, _reading: ViewReader) -> Sequence[str]:
    """Users that nobody can log in as yet."""
    return [
        f"user {name!r} has no password and is refused: PATCH /v1/access-lists/{made.name}"
        for name in locked_users(Access(users=made.spec.users))
    ]


ACCESS_LISTS = PublicResource(
    name="access-list",
    plural="access-lists",
    short=("acl",),
    summary="Rules, bans and users that virtual hosts refer to",
    kind=ACCESS_LIST,
    spec=AccessListSpecView,
    status=NoStatus,
    view=list_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda found, _reading: found.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="RULES", value=lambda shown: len(shown["spec"]["rules"]), type="number"),
        Column(title="BANNED", value=lambda shown: len(shown["spec"]["banned"]), type="number"),
        Column(title="USERS", value=lambda shown: len(shown["spec"]["users"]), type="number"),
    ),
)
ACCESS_LIST_WRITER = Writable(
    anywhere=True,
    permission=access.OPERATE,
    find=find_list,
    put=put_list,
    delete=delete_list,
    rank=11,
    referred_to=True,
    disturbs=reloads,
    warns=list_warnings,
)


# Certificates.


def find_certificate(_domain: object, draft: Draft, scope: str, name: str) -> Certificate | None:
    """By its domain, for which several providers may have issued one."""
    at = place_of(draft, scope)
    found = [] if at is None else certificates_called(draft, at, name)
    if len(found) > 1:
        raise Conflict(
            f"{len(found)} certificates of {scope} are for {name!r}",
            field="name",
            hint="delete all but one of them first: DELETE /v1/certificates/ID",
        )
    return draft.get(CERTIFICATE, at, found[0]) if at is not None and found else None


def put_certificate(call: WriteCall) -> Certificate:
    """Ask for a certificate, or say whether it is renewed."""
    domain: ProxyParts = call.domain
    given: ProxyCertificateSpecView = call.spec
    scope, stored = required_place(call), call.stored
    imported = given.provider == IMPORTED
    if imported and given.auto_renew:
        raise InvalidArgument("its owner renews an imported certificate", field="auto_renew")
    spec = CertificateSpec(
        domain=(given.domain or call.name).lower(),
        provider=given.provider,
        auto_renew=not imported if given.auto_renew is None else given.auto_renew,
    )
    identity = call.new_id() if stored is None else stored.name
    return domain.certificates.put_in(batch_of(call), scope, identity, spec)


def delete_certificate(call: WriteCall) -> None:
    """Delete a certificate that nothing refers to, and its private keys."""
    domain: ProxyParts = call.domain
    assert call.stored is not None
    domain.certificates.delete_in(batch_of(call), call.stored)


def certificate_warnings(made: Certificate, _reading: ViewReader) -> Sequence[str]:
    """A certificate that nobody but its owner can bring."""
    if made.spec.provider != IMPORTED or (made.status is not None and made.status.fingerprint):
        return ()
    return (f"the certificate of {made.spec.domain} waits until it is imported with its private key",)


CERTIFICATE_WRITER = Writable(
    anywhere=True,
    permission=access.OPERATE,
    find=find_certificate,
    put=put_certificate,
    delete=delete_certificate,
    rank=11,
    referred_to=True,
    warns=certificate_warnings,
)


# Settings.


class WorkspaceSettingsSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    nginx_directives: dict[str, str] = msgspec.field(default_factory=dict)
    env_vars: dict[str, str | Secret] = msgspec.field(default_factory=dict)
    """Values are written, and never shown. One that is not named stays; `{"set": false}` takes it away."""


def settings_view(
    found: WorkspaceSettings, _reading: ViewReader
) -> ResourceView[WorkspaceSettingsSpecView, NoStatus]:
    """What is shown of a workspace's settings; of its variables, their names."""
    shown = without_secrets(found.spec)
    return ResourceView(
        spec=WorkspaceSettingsSpecView(
            nginx_directives=shown.nginx_directives,
            env_vars={name: Secret(set=True) for name in found.spec.env_vars},
        ),
        status=None,
    )


def find_settings(_domain: object, draft: Draft, scope: str, name: str) -> WorkspaceSettings | None:
    """There is one for each workspace."""
    if name != SETTINGS_NAME:
        raise InvalidArgument(f"a workspace's settings are called {SETTINGS_NAME!r}", field="name")
    at = place_of(draft, scope)
    return None if at is None else draft.get(SETTINGS, at, SETTINGS_NAME)


def put_settings(call: WriteCall) -> WorkspaceSettings:
    """Replace a workspace's settings."""
    domain: ProxyParts = call.domain
    given: WorkspaceSettingsSpecView = call.spec
    before: SettingsSpec = SettingsSpec() if call.stored is None else call.stored.spec
    directives = with_known_secrets(
        SettingsSpec(nginx_directives=given.nginx_directives),
        SettingsSpec(nginx_directives=before.nginx_directives),
    ).nginx_directives
    refuse(masked_values(directives, "nginx_directives"))
    spec = SettingsSpec(nginx_directives=directives, env_vars=_variables(given.env_vars, before.env_vars))
    scope = required_place(call)
    return domain.hosts.put_settings_in(batch_of(call), scope, spec, raw=raw_right(call))


def _variables(given: dict[str, str | Secret], known: dict[str, str]) -> dict[str, str]:
    """What is not given anew stays as it is."""
    merged: dict[str, str] = dict(known)
    for name, value in given.items():
        if isinstance(value, str):
            merged[name] = value
        elif not value.set:
            merged.pop(name, None)
    return merged


def delete_settings(call: WriteCall) -> None:
    """Take all settings of a workspace away."""
    domain: ProxyParts = call.domain
    assert call.stored is not None
    domain.hosts.delete_settings_in(batch_of(call), call.stored, raw=raw_right(call))


WORKSPACE_SETTINGS = PublicResource(
    name="workspace-settings",
    plural="workspace-settings",
    short=("wss",),
    summary="Directives and variables of a whole workspace",
    kind=SETTINGS,
    spec=WorkspaceSettingsSpecView,
    status=NoStatus,
    view=settings_view,
    place=place,
    moves=True,
    permission=access.READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SCOPE", value=".metadata.scope"),
        Column(title="DIRECTIVES", value=lambda shown: len(shown["spec"]["nginxDirectives"]), type="number"),
        Column(title="VARIABLES", value=lambda shown: len(shown["spec"]["envVars"]), type="number"),
    ),
)
SETTINGS_WRITER = Writable(
    anywhere=True,
    permission=access.RAW,
    find=find_settings,
    put=put_settings,
    delete=delete_settings,
    rank=11,
    disturbs=reloads,
)

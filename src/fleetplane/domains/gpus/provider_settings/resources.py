"""Settings of providers as an object of the resource API: read, written, planned and applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetplane.domains.gpus.provider_settings import rules
from fleetplane.domains.gpus.provider_settings.delivery import (
    AT,
    NAME,
    PROVIDER_SETTINGS,
    SETTINGS_APPLIED,
    StoredSettings,
)
from fleetplane.domains.gpus.provider_settings.rules import ProviderSettingsSpec
from fleetplane.domains.gpus.resources import READ
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.declaration import (
    READING,
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.fleet.rollouts.holds import digest
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft

OPERATE = Permission("gpus.operate")
PROBLEMS_LIMIT = 20
"""Providers that are named with what is wrong with them."""


class ProviderSettingsView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    heartbeat_seconds: float | None = None
    """Seconds between heartbeats, a third of the lease at most; null leaves it to the provider."""
    ignored_xids: tuple[int, ...] = ()
    """XIDs that condemn no GPU, besides those that applications cause."""
    enumerate_every_seconds: float | None = None
    """How often GPUs are looked at anew, which lets recovered ones report; null: as it was started."""


class ProviderSettingsStatus(ResourceShape, frozen=True):
    version: str
    """Of the settings as they are written here; providers may be held at another by a rollout."""
    providers: int
    """That ask for settings and hold a lease, or held one."""
    in_place: int
    """Of those, with this very version in force."""
    problems: Mapping[str, str]
    """By provider, why it did not take what it was sent; of the first twenty."""


def settings_view(
    found: StoredSettings, reading: ViewReader
) -> ResourceView[ProviderSettingsView, ProviderSettingsStatus]:
    """What is shown of the settings."""
    spec, version = found.spec, digest(rules.encoded(found.spec))
    reports = [(one.name, one.status) for one in reading.list(SETTINGS_APPLIED, AT)]
    failing = [(name, status.error) for name, status in reports if status is not None and status.error]
    return ResourceView(
        spec=ProviderSettingsView(
            heartbeat_seconds=spec.heartbeat_seconds,
            ignored_xids=spec.ignored_xids,
            enumerate_every_seconds=spec.enumerate_every_seconds,
        ),
        status=ProviderSettingsStatus(
            version=version,
            providers=len(reports),
            in_place=sum(status is not None and status.version == version for _, status in reports),
            problems=dict(failing[:PROBLEMS_LIMIT]),
        ),
    )


def find_settings(_domain: object, draft: Draft, scope: str, name: str) -> StoredSettings | None:
    """The one object there is."""
    if scope != scopes.ROOT:
        raise InvalidArgument(f"settings of providers lie at {scopes.ROOT}, not at {scope}", field="scope")
    return draft.get(PROVIDER_SETTINGS, AT, name)


def put_settings(call: WriteCall) -> StoredSettings:
    """Write what every provider that asks is to have."""
    if call.name != NAME:
        raise InvalidArgument(
            f"{call.name[:80]!r} is no name of settings", field="name", hint=f"there is one object: {NAME}"
        )
    given: ProviderSettingsView = call.spec
    spec = ProviderSettingsSpec(
        heartbeat_seconds=given.heartbeat_seconds,
        ignored_xids=given.ignored_xids,
        enumerate_every_seconds=given.enumerate_every_seconds,
    )
    lease_seconds = call.domain.settings.lease_seconds
    return call.draft.put(PROVIDER_SETTINGS, AT, NAME, spec=rules.checked(spec, lease_seconds=lease_seconds))


def delete_settings(call: WriteCall) -> None:
    """Leave everything to providers again; that is a version like others, and waits for rollouts."""
    call.draft.delete(PROVIDER_SETTINGS, AT, NAME)


def disturbs(_before: AnyResource | None, after: AnyResource | None, _reading: ViewReader) -> Sequence[str]:
    """What happens to providers: nothing but new settings, unless all of them go."""
    return ("providers go on with the settings that they were started with",) if after is None else ()


SETTINGS = PublicResource(
    name="provider-settings",
    plural="provider-settings",
    summary="Settings of this machine's providers of GPUs that ask for them",
    kind=PROVIDER_SETTINGS,
    spec=ProviderSettingsView,
    status=ProviderSettingsStatus,
    view=settings_view,
    place=lambda _stored, _reading: scopes.ROOT,
    permission=READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="HEARTBEAT", value=".spec.heartbeatSeconds", type="number"),
        Column(title="PROVIDERS", value=".status.providers", type="number"),
        Column(title="IN PLACE", value=".status.inPlace", type="number"),
        Column(title="VERSION", value=".status.version", wide=True),
    ),
    verbs=READING,
)
SETTINGS_WRITERS: Mapping[str, Writable] = {
    "provider-settings": Writable(
        permission=OPERATE,
        find=find_settings,
        put=put_settings,
        delete=delete_settings,
        rank=22,
        disturbs=disturbs,
    )
}

"""Settings of instances and of their three listeners."""

from __future__ import annotations

from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import ListenerSettings, at_least, one_of
from fleetplane.sections.process import ObjectStorageSettings


class InstanceSettings(ObjectStorageSettings, frozen=True):
    shard: str = "local"
    """Which document this server follows: `shard/{shard}/config.jsonc` in the object storage."""
    provider: str = ""
    """Overrides the document's infrastructure provider."""
    advertise: str = "config"
    """Tell agents the document's `advertise` addresses, or those of the `listeners`."""
    drain_on_scale_down: bool = True
    first_generation_tenants: tuple[str, ...] = ()
    """Tenants whose operators expect the first numbering of group events."""
    silence_share: float = 0.5
    """When more than this share of a group or tenant falls silent at once, nobody is drained; 1: never."""
    silence_window_seconds: float = 300.0
    """How far apart their last reports may lie to count as at once."""
    silence_hold_seconds: float = 900.0
    """How long they are left alone; after that they go one at a time."""
    tenant_instances: int = 100
    """Instances that a tenant may have, unless the document says otherwise; 0: any number."""
    agent_command: tuple[str, ...] = ()
    """The program, with its arguments, that the provider `local` runs as agent; our own when empty."""
    agent_variables: tuple[str, ...] = ()
    """Environment variables that a document may set for local agents, beside `NSTANCE_…`."""
    machine: str = ""
    """The provider's id of the machine that the server runs on: the leader's address goes there."""
    userdata_hosts: tuple[str, ...] = ()
    """Hosts in private networks that user data may be fetched from."""

    def __post_init__(self) -> None:
        at_least("instances.silence_share", self.silence_share, 0)
        at_least("instances.silence_window_seconds", self.silence_window_seconds, 0)
        at_least("instances.silence_hold_seconds", self.silence_hold_seconds, 0)
        at_least("instances.tenant_instances", self.tenant_instances, 0)
        one_of("instances.storage", self.storage, ("file", "s3"))
        one_of("instances.advertise", self.advertise, ("config", "listeners"))
        if self.storage == "s3" and not self.bucket:
            raise SettingsError("instances.bucket: must be given for the storage s3")


class RegistrationSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8992",)


class OperatorSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8993",)
    tokens: bool = False
    """Whether people and programs may show a token instead of a client certificate."""


class AgentSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8994",)

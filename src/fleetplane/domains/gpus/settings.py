"""Settings of GPUs and of the device API's listener."""

from __future__ import annotations

from fleetplane.domains.gpus.grpc.generations import Generation
from fleetplane.domains.gpus.rules import GpuPolicy, TransitionTimes
from fleetplane.domains.gpus.wire import SELECTABLE, GpuDialect
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import DEFAULT_PLACE, ListenerSettings, SettingsSection, at_least, one_of


class GpuSettings(SettingsSection, frozen=True):
    lease_seconds: float = 30.0
    transition_times: TransitionTimes = TransitionTimes.STRICT
    max_gpus: int = 4096
    max_condition_types: int = 32
    max_providers: int = 256
    shared_writes: bool = False
    """Whether a provider that names itself may overwrite conditions, and remove GPUs, of another."""
    node: str = ""
    """This node's name in the metrics; the host's name when empty."""

    def __post_init__(self) -> None:
        at_least("gpus.lease_seconds", self.lease_seconds, 0)
        for name in ("max_gpus", "max_condition_types", "max_providers"):
            at_least(f"gpus.{name}", getattr(self, name), 1)

    def policy(self) -> GpuPolicy:
        return GpuPolicy(
            lease_seconds=self.lease_seconds,
            transition_times=self.transition_times,
            max_gpus=self.max_gpus,
            max_condition_types=self.max_condition_types,
            max_providers=self.max_providers,
            shared_writes=self.shared_writes,
        )


class DeviceApiSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = (DEFAULT_PLACE, "127.0.0.1:50051")
    socket_mode: str = "0660"
    dialect: GpuDialect = GpuDialect.SUPERSET
    """Of the answers, when the caller's metadata asks for none."""
    nvsentinel_generation: Generation = Generation.AUTO
    """Of clients of the package nvidia.nvsentinel.v1alpha1 whose requests do not tell: first or later."""
    allow_remote_plaintext: bool = False
    """Permit addresses beyond loopback. Anyone who can reach them can read GPU health."""
    tcp_writes: bool = False
    """Permit writing at TCP addresses, too: by every user of the machine, or whoever else reaches them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("listeners.device-api.dialect", self.dialect, SELECTABLE)
        one_of("listeners.device-api.nvsentinel_generation", self.nvsentinel_generation, tuple(Generation))
        try:
            valid = 0 <= int(self.socket_mode, 8) <= 0o777
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(
                f"listeners.device-api.socket_mode: {self.socket_mode!r} is no octal file mode"
            )

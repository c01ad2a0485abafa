"""Settings that the server sends, and what the node's owner keeps to itself.

What the owner gave on the command line wins: a version that sets it to something else is refused as a whole,
and the server is told why. A version that is taken is on disk before it is in force, so that a provider that
starts without a server goes on with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import grpc
import grpc.aio
import msgspec

from fleetplane.domains.gpus.agent.session import SessionLog
from fleetplane.domains.gpus.provider_settings import rules
from fleetplane.domains.gpus.provider_settings.rules import ProviderSettingsSpec
from fleetplane.domains.gpus.xids import ignored_xids
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as pb
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.files import write_durably
from fleetplane.node.connection import Metadata
from fleetplane.node.link import words
from fleetplane.node.tasks import in_thread

CALL_LIMIT_SECONDS: Final = 5.0
SHORTEST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 60.0
"""Between questions, whatever the server says."""
FILE_LIMIT_BYTES: Final = 65_536

HEARTBEAT, IGNORED, ENUMERATE = "heartbeat_seconds", "ignored_xids", "enumerate_every_seconds"
FLAGS: Final = {
    HEARTBEAT: "--heartbeat-seconds",
    IGNORED: "--ignored-xids",
    ENUMERATE: "--enumerate-every",
}


class EffectiveFields(TypedDict):
    heartbeat_seconds: float
    ignored_xids: frozenset[int]
    enumerate_every_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSettings:
    """What is in force."""

    heartbeat_seconds: float
    ignored_xids: frozenset[int]
    """All of them, those that applications cause included."""
    enumerate_every_seconds: float | None

    def as_fields(self) -> EffectiveFields:
        """By name, as a policy has them."""
        return {
            "heartbeat_seconds": self.heartbeat_seconds,
            "ignored_xids": self.ignored_xids,
            "enumerate_every_seconds": self.enumerate_every_seconds,
        }


class KeptSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The file: a version that was taken."""

    digest: str
    settings: ProviderSettingsSpec


class SettingsKeeper:
    """What this provider is set to, by its owner and by the server."""

    def __init__(
        self,
        own: EffectiveSettings,
        *,
        given: frozenset[str],
        folder: Path,
        provider_id: str,
        apply: Callable[[EffectiveSettings], None],
        clock: Clock,
        log: SessionLog,
    ) -> None:
        """`own` is what the provider was started with; of that, `given` was named on the command line."""
        self._own = own
        self._given = given
        self._provider_id = provider_id
        # Any id is a file name so, and two providers of one machine may share the folder.
        name = hashlib.sha256(provider_id.encode()).hexdigest()[:16]
        self.path = folder / f"settings-{name}.json"
        self._apply = apply
        self._clock = clock
        self._log = log
        self._applied = self._wanted = self._error = ""
        self._failures = 0
        self.current = own

    def __repr__(self) -> str:
        return f"<SettingsKeeper {self._applied[:12] or 'own'}{' refused' if self._error else ''}>"

    def load(self) -> None:
        """Go on with what was taken last, if the owner has not decided otherwise since. Blocking."""
        try:
            with self.path.open("rb") as file:
                content = file.read(FILE_LIMIT_BYTES)
            kept = msgspec.json.decode(content, type=KeptSettings)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._log.warning("provider_settings_unreadable", path=str(self.path), error=str(error))
            return
        try:
            self._put_in_force(kept.digest, rules.checked(kept.settings, lease_seconds=0))
        except InvalidArgument as error:
            self._refuse(kept.digest, error)

    def said(self) -> pb.SyncSettingsRequest:
        """What the server is told."""
        return pb.SyncSettingsRequest(
            provider_id=self._provider_id,
            applied=self._applied,
            wanted=self._wanted,
            error=self._error,
            failures=self._failures,
        )

    async def take(self, sent: pb.ProviderSettings, *, lease_seconds: float) -> None:
        """Put a version in force, or remember why not."""
        try:
            spec = rules.checked(rules.received(sent), lease_seconds=lease_seconds)
            self._check_given(spec)
            await in_thread(lambda: self._keep(sent.digest, spec))
            self._put_in_force(sent.digest, spec)
        except InvalidArgument as error:
            self._refuse(sent.digest, error)
        except OSError as error:
            why = f"cannot be kept in {self.path.parent}: {error.strerror or error}; give --state-dir"
            self._refuse(sent.digest, InvalidArgument(why))
        else:
            self._log.info("provider_settings_taken", version=sent.digest)

    def _keep(self, digest: str, spec: ProviderSettingsSpec) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = msgspec.json.encode(KeptSettings(digest=digest, settings=spec))
        write_durably(self.path, content, mode=0o600)

    def _check_given(self, spec: ProviderSettingsSpec) -> None:
        own = self._own
        others = {
            HEARTBEAT: spec.heartbeat_seconds is not None and spec.heartbeat_seconds != own.heartbeat_seconds,
            IGNORED: bool(spec.ignored_xids) and ignored_xids(spec.ignored_xids) != own.ignored_xids,
            ENUMERATE: spec.enumerate_every_seconds is not None
            and spec.enumerate_every_seconds != own.enumerate_every_seconds,
        }
        if against := sorted(FLAGS[name] for name in self._given if others.get(name)):
            raise InvalidArgument(f"the owner of the node gave {', '.join(against)}, which counts")

    def _put_in_force(self, digest: str, spec: ProviderSettingsSpec) -> None:
        self._check_given(spec)
        own = self._own
        self.current = EffectiveSettings(
            heartbeat_seconds=spec.heartbeat_seconds or own.heartbeat_seconds,
            ignored_xids=ignored_xids(spec.ignored_xids) if spec.ignored_xids else own.ignored_xids,
            enumerate_every_seconds=spec.enumerate_every_seconds or own.enumerate_every_seconds,
        )
        self._applied = self._wanted = digest
        self._error = ""
        self._apply(self.current)

    def _refuse(self, digest: str, error: FleetplaneError) -> None:
        field = f"{error.field}: " if error.field else ""
        self._wanted, self._error = digest, f"{field}{error.message}"
        self._failures += 1
        self._log.warning("provider_settings_refused", version=digest, error=self._error)

    async def follow(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        """Ask for settings while a connection lasts. A server that has none is served all the same."""
        stub = provider_settings_pb2_grpc.ProviderSettingsServiceStub(channel)
        while True:
            pause = LONGEST_SECONDS
            try:
                answer: pb.SyncSettingsResponse = await stub.SyncSettings(
                    self.said(), timeout=CALL_LIMIT_SECONDS, metadata=tuple(metadata())
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
                self._log.warning("provider_settings_unknown", error=words(error))
            else:
                pause = answer.next_seconds
                if answer.HasField("settings"):
                    await self.take(answer.settings, lease_seconds=answer.lease_seconds)
                    pause = 0.0
            await self._clock.sleep(min(LONGEST_SECONDS, max(SHORTEST_SECONDS, pause)))

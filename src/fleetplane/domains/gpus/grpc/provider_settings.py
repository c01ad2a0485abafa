"""`fleetplane.device.v1.ProviderSettingsService`: what our own provider asks about its settings."""

from __future__ import annotations

from fleetplane.domains.gpus.provider_settings.delivery import ProviderSettings
from fleetplane.domains.gpus.releases import check_provider
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as pb
from fleetplane.rpc import CallContext

SERVICE = pb.DESCRIPTOR.services_by_name["ProviderSettingsService"]


class ProviderSettingsService:
    def __init__(self, settings: ProviderSettings) -> None:
        self._settings = settings

    async def SyncSettings(
        self, request: pb.SyncSettingsRequest, _context: CallContext
    ) -> pb.SyncSettingsResponse:
        check_provider(request.provider_id, field="provider_id")
        return await self._settings.heard(request)

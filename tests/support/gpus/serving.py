"""A server of GPUs alone, for tests that run one in their own process."""

from __future__ import annotations

from pathlib import Path

from fleetplane import settings
from fleetplane.settings import Settings


def gpus_only(folder: Path) -> Settings:
    flags = {
        "only": "gpus",
        "data_dir": str(folder / "data"),
        "listeners.web.addresses": "127.0.0.1:0",
        "listeners.device-api.addresses": "127.0.0.1:0",
    }
    return settings.load(config=None, environment={}, flags=flags)

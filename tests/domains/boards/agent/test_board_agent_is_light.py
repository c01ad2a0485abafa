"""The node side runs on small machines: it must not bring the server along."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = (
    "aiosqlite", "alembic", "fleetplane.kernel.store", "fleetplane.web", "h2corn", "litestar", "obstore",
    "sqlalchemy",
)  # fmt: skip
HARDWARE = (
    "board_sources", "bus_ports", "buses", "gpio.gpiod_chip", "gpio.simulated", "gpio.sysfs_pwm",
    "host_sources", "metrics_sampler", "pins", "simulated_buses",
)  # fmt: skip
IMPORT_THEM = "import importlib, json, sys\n" + "".join(
    f"importlib.import_module('fleetplane.domains.boards.agent.{name}')\n" for name in HARDWARE
)


def test_hardware_is_reached_without_loading_anything_of_the_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_THEM + "print(json.dumps(sorted(sys.modules)))"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    loaded = json.loads(done.stdout)
    assert "fleetplane.domains.boards.agent.pins" in loaded
    assert [name for name in loaded if name.startswith((*HEAVY, "fleetplane.rpc", "grpc"))] == []

"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path


def described() -> str:
    """One paragraph: processor, system, versions, and how busy the machine was."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    h2load = subprocess.run(["h2load", "--version"], capture_output=True, text=True, check=True).stdout
    gibibytes = int(memory[1]) / 2**20 if memory else 0
    packages = ", ".join(f"{name} {version(name)}" for name in ("h2corn", "grpcio", "protobuf", "uvloop"))
    return (
        f"{processor[1] if processor else platform.machine()}, {os.cpu_count()} cores, {gibibytes:.0f} GiB; "
        f"Linux {platform.release()}, Python {platform.python_version()}, {packages}, {h2load.split()[-1]}; "
        f"load average at the end {os.getloadavg()[0]:.1f}."
    )

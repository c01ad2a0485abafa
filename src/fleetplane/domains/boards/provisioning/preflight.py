"""Is a board fit for k3s: one command that looks, and what follows from what it saw. Pure.

The commonest reason why k3s does not start on a fresh board is the missing memory cgroup, which
the boot loader leaves out unless its one line says otherwise. That alone can be put right here;
everything else is told.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import msgspec

from fleetplane.kernel.errors import FailedPrecondition

MEMORY_BYTES = 1024**3 * 9 // 10
"""A board of one gigabyte keeps some of it for its graphics."""
DISK_BYTES = 2 * 1024**3
"""For k3s, its images and a little room."""
SKEW_SECONDS = 60.0
"""Certificates of a board whose clock is further off are refused by others."""
ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "armv7l": "arm", "x86_64": "amd64", "amd64": "amd64"}
SERVER_PORTS = (6443, 10250)
AGENT_PORTS = (10250,)
CMDLINE_WORDS = ("cgroup_memory=1", "cgroup_enable=memory")
OUTPUT_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardPaths:
    """Where a board has what is looked at, and where things are put."""

    cgroup_controllers: str = "/sys/fs/cgroup/cgroup.controllers"
    cgroups: str = "/proc/cgroups"
    cmdlines: tuple[str, ...] = ("/boot/firmware/cmdline.txt", "/boot/cmdline.txt")
    disk: str = "/var/lib"
    boot_id: str = "/proc/sys/kernel/random/boot_id"
    configuration: str = "/etc/rancher/k3s"
    programs: str = "/usr/local/bin"
    mark: str = ".fleetplane-provisioning"
    """Which server's order was carried out last, where there are several; in the home of the login."""

    @property
    def join_token(self) -> str:
        return f"{self.configuration}/fleetplane-join-token"


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str = ""
    memory_bytes: int = 0
    disk_bytes: int = 0
    clock_seconds: float = 0.0
    memory_cgroup: bool = False
    cmdline: str = ""
    """The boot loader's file; empty where there is none."""
    hostname: str = ""
    system: str = ""
    kernel: str = ""
    listening: tuple[int, ...] = ()
    root: bool = False
    sudo: bool = False
    installed: str = ""
    """The k3s that is there already."""
    root_device: str = ""


_CGROUP = """if grep -qw memory {controllers} 2>/dev/null; then echo memory_cgroup=1
elif awk '$1 == "memory" && $4 == 1 {{found=1}} END {{exit !found}}' {cgroups} 2>/dev/null
then echo memory_cgroup=1; else echo memory_cgroup=0; fi"""


def probe(places: BoardPaths) -> str:
    """One command that prints `key=value` lines and changes nothing."""
    q = shlex.quote
    cmdlines = " ".join(q(path) for path in places.cmdlines)
    return "\n".join(
        (
            "set -u",
            'echo "architecture=$(uname -m)"',
            'echo "kernel=$(uname -r)"',
            'echo "hostname=$(uname -n)"',
            'echo "clock=$(date +%s)"',
            "echo \"memory_kb=$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)\"",
            f"echo \"disk_kb=$(df -Pk {q(places.disk)} | awk 'NR==2 {{print $4}}')\"",
            "echo \"root_device=$(df -P / | awk 'NR==2 {print $1}')\"",
            'echo "system=$( . /etc/os-release 2>/dev/null && echo "${PRETTY_NAME:-}")"',
            _CGROUP.format(controllers=q(places.cgroup_controllers), cgroups=q(places.cgroups)),
            f'for file in {cmdlines}; do if [ -e "$file" ]; then echo "cmdline=$file"; break; fi; done',
            'echo "uid=$(id -u)"',
            "if sudo -n true 2>/dev/null; then echo sudo=1; else echo sudo=0; fi",
            'echo "ports=$(ss -Htln 2>/dev/null | awk \'{n=split($4,a,":"); printf "%s ", a[n]}\')"',
            'echo "installed=$(k3s --version 2>/dev/null | head -n 1)"',
        )
    )


def read(output: str) -> Findings:
    """What the probe printed; lines that it did not print are ignored."""
    found: dict[str, str] = {}
    for line in output[:OUTPUT_LIMIT].splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found.setdefault(key, value.strip())
    installed = found.get("installed", "").split()
    return Findings(
        architecture=found.get("architecture", ""),
        memory_bytes=_number(found, "memory_kb") * 1024,
        disk_bytes=_number(found, "disk_kb") * 1024,
        clock_seconds=float(_number(found, "clock")),
        memory_cgroup=found.get("memory_cgroup") == "1",
        cmdline=found.get("cmdline", ""),
        hostname=found.get("hostname", ""),
        system=found.get("system", ""),
        kernel=found.get("kernel", ""),
        listening=tuple(int(port) for port in found.get("ports", "").split() if port.isdecimal()),
        root=found.get("uid") == "0",
        sudo=found.get("sudo") == "1",
        installed=installed[2] if len(installed) > 2 else "",
        root_device=found.get("root_device", ""),
    )


def _number(found: dict[str, str], key: str) -> int:
    text = found.get(key, "")
    return int(text) if text.isdecimal() and len(text) < 16 else 0


class PreflightVerdict(msgspec.Struct, frozen=True, kw_only=True):
    problems: tuple[str, ...]
    """Nothing is done while there are any."""
    warnings: tuple[str, ...]
    needs_cgroup: bool
    """The boot loader's line must be changed, and the board restarted."""


def judge(findings: Findings, *, server: bool, now_seconds: float) -> PreflightVerdict:
    problems, warnings = [], []
    if findings.architecture not in ARCHITECTURES:
        problems.append(f"architecture: there is no k3s for {findings.architecture or 'an unknown one'}")
    elif findings.architecture == "armv7l":
        warnings.append("architecture: a 32-bit system; many images exist for 64 bits only")
    if findings.memory_bytes < MEMORY_BYTES:
        problems.append(
            f"memory: {findings.memory_bytes // 1024**2} MiB, k3s needs {MEMORY_BYTES // 1024**2}"
        )
    if findings.disk_bytes < DISK_BYTES:
        problems.append(
            f"disk: {findings.disk_bytes // 1024**2} MiB free, {DISK_BYTES // 1024**2} are needed"
        )
    skew = findings.clock_seconds - now_seconds
    if abs(skew) > SKEW_SECONDS:
        problems.append(f"clock: {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}; set up NTP first")
    if not (findings.root or findings.sudo):
        problems.append("privileges: neither root nor sudo without a password")
    needs_cgroup = not findings.memory_cgroup
    if needs_cgroup and not findings.cmdline:
        problems.append("cgroup: the memory controller is off, and there is no cmdline.txt to turn it on in")
    if not findings.installed:
        wanted = SERVER_PORTS if server else AGENT_PORTS
        taken = [port for port in wanted if port in findings.listening]
        problems += [f"port: somebody listens on {port} already" for port in taken]
    if server and "mmcblk" in findings.root_device:
        warnings.append("disk: a server's database wears an SD card out; an SSD lasts longer")
    return PreflightVerdict(problems=tuple(problems), warnings=tuple(warnings), needs_cgroup=needs_cgroup)


def require(verdict: PreflightVerdict) -> None:
    if verdict.problems:
        raise FailedPrecondition("; ".join(verdict.problems), details={"cause": "preflight"})


def edited_cmdline(text: str) -> str | None:
    """The boot loader's line with the memory controller on; None if it says so already.

    The loader reads the first line only, so a second line would be ignored: everything is on one.
    """
    words = text.split()
    kept = [word for word in words if not word.startswith(("cgroup_memory=", "cgroup_disable=memory"))]
    kept = [word for word in kept if word != "cgroup_enable=memory"]
    edited = " ".join([*kept, *CMDLINE_WORDS]) + "\n"
    unchanged = all(word in words for word in CMDLINE_WORDS) and "cgroup_disable=memory" not in words
    return None if unchanged and len(text.strip().splitlines()) == 1 else edited

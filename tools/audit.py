"""Say which pinned packages have known vulnerabilities: `python tools/audit.py [REQUIREMENTS...]`.

Ends with 0 when every package was looked up and none is known to be vulnerable, with 1 when one is, and with
3 when the database of advisories could not be asked about all of them. Silence never passes for a clean
bill: the tool that is used reports packages it could not look up as skipped, and ends with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ("requirements.txt", "requirements-dev.txt")
CLEAN, VULNERABLE, UNKNOWN = 0, 1, 3
TIMEOUT_SECONDS = 600.0


def judge(packages: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """The exit code, and what to print, for what was reported of each package."""
    skipped = [package for package in packages if "skip_reason" in package]
    lines = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in packages
        for vulnerability in package.get("vulns", ())
    ]
    if lines:
        return VULNERABLE, lines
    if skipped or not packages:
        return UNKNOWN, [
            f"not audited: no advisories to be had about {len(skipped)} of {len(packages)} packages",
            "run `make audit` where the package index publishes advisories, before you release",
        ]
    return CLEAN, [f"no known vulnerability in {len(packages)} packages"]


def report(requirements: Path) -> list[dict[str, Any]] | str:
    """What the audit says of each package, or why there was none."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--disable-pip",
        "--require-hashes",
        "--requirement",
        str(requirements),
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT_SECONDS:.0f} s"
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return (done.stderr.strip().splitlines() or ["the audit printed nothing"])[-1]
    return packages


def main(names: list[str]) -> int:
    worst = CLEAN
    for name in names or DEFAULT:
        found = report(ROOT / name)
        code, lines = (UNKNOWN, [f"not audited: {found}"]) if isinstance(found, str) else judge(found)
        for line in lines:
            print(f"audit: {name}: {line}")
        worst = VULNERABLE if VULNERABLE in (worst, code) else max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

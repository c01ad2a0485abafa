"""What is installed is what was pinned, and set-up leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import audit

ROOT = Path(__file__).resolve().parent.parent.parent
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt", "requirements-audit.txt")
WAIT_SECONDS = 60.0


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    return {
        normal(name): version
        for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE)
    }


def declared() -> list[str]:
    files = (ROOT / "pyproject.toml", ROOT / "packages" / "fleetplane" / "pyproject.toml")
    return [
        dependency
        for file in files
        for dependency in tomllib.loads(file.read_text())["project"]["dependencies"]
        if not dependency.startswith("fleetplane-agent")
    ]


@pytest.mark.parametrize("dependency", declared())
def test_every_runtime_dependency_is_bounded_and_pinned(dependency: str) -> None:
    requirement = dependency.partition(";")[0].strip()
    name = re.split(r"[\[<>=]", requirement)[0]

    assert re.search(r">=\d", requirement), f"{requirement} has no lower bound"
    assert re.search(r",<\d", requirement), f"{requirement} has no upper bound"
    assert normal(name) in pins(ROOT / "requirements.txt")


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_pin_has_a_hash_no_address_and_the_version_of_the_constraints(name: str) -> None:
    text = (ROOT / name).read_text()
    entries = re.findall(r"^[A-Za-z0-9._-]+==.*(?:\n    .*)*", text, re.MULTILINE)
    constraints = pins(ROOT / "constraints.txt")

    assert len(entries) > 20
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text
    assert "--index" not in text
    differing = {
        package: version
        for package, version in pins(ROOT / name).items()
        if constraints.get(package, version) != version
    }
    assert differing == {}


def test_constraints_pin_everything_that_the_product_needs() -> None:
    elsewhere = {"colorama", "tzdata"}  # needed on Windows only, where nothing of ours runs
    assert set(pins(ROOT / "requirements.txt")) - elsewhere <= set(pins(ROOT / "constraints.txt"))


def tools_copy(folder: Path) -> Path:
    (folder / "tools").mkdir()
    return Path(shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools"))


def small_wheel(folder: Path) -> Path:
    path = folder / "tampered-1.0-py3-none-any.whl"
    info = "tampered-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tampered.py", "raise SystemExit('this must never be imported')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tampered\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_a_package_with_other_bytes_than_were_pinned_is_not_installed(tmp_path: Path) -> None:
    script = tools_copy(tmp_path)
    genuine = hashlib.sha256(b"what was published").hexdigest()
    (tmp_path / "requirements-audit.txt").write_text(f"tampered==1.0 --hash=sha256:{genuine}\n")
    small_wheel(tmp_path)
    environment = {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PYTHON": sys.executable,
    }

    done = subprocess.run(
        [script, "audit", tmp_path / "env"], env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode != 0
    assert "HASHES" in done.stderr
    assert list((tmp_path / "env").rglob("tampered*")) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_set_up_leaves_no_policy_behind_that_stops_services(
    tmp_path: Path, ending: signal.Signals
) -> None:
    script = tools_copy(tmp_path)
    script.write_text(script.read_text().replace("need_quiet nginx nginx", "need_quiet no-such-daemon x"))
    policy, programs = tmp_path / "policy-rc.d", tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "apt-get": f"touch {tmp_path / 'begun'}\nexec sleep 120",
        "sudo": 'exec "$@"',
        "env": 'shift; exec "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "POLICY_RC_D": str(policy)}

    running = subprocess.Popen(
        ["/bin/bash", script, "run"], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (tmp_path / "begun").exists():
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert policy.exists()
        os.killpg(running.pid, ending)  # as a terminal does: the script and what it waits for
        code = running.wait(WAIT_SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()

    assert code != 0
    assert not policy.exists()


def test_an_audit_that_could_ask_nobody_is_not_a_clean_one() -> None:
    skipped: list[dict[str, Any]] = [
        {"name": "acme", "skip_reason": "not found"},
        {"name": "click", "version": "8", "vulns": []},
    ]

    code, lines = audit.judge(skipped)

    assert code == audit.UNKNOWN
    assert "not audited" in lines[0]
    assert "1 of 2" in lines[0]
    assert audit.judge([])[0] == audit.UNKNOWN


def test_an_audit_names_what_is_vulnerable_and_what_mends_it() -> None:
    found: dict[str, Any] = {
        "name": "click",
        "version": "8.0",
        "vulns": [{"id": "CVE-1", "fix_versions": ["8.1"]}],
    }

    assert audit.judge([found, {"name": "x", "skip_reason": "?"}]) == (
        audit.VULNERABLE,
        ["click 8.0: CVE-1, fixed in 8.1"],
    )
    assert audit.judge([{"name": "click", "version": "8.1", "vulns": []}])[0] == audit.CLEAN

"""`make run-cluster`: a real balancer before three real servers, of which the active one is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "run_cluster.py"
TAKEOVER_SECONDS = 10.0


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_cluster", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_balancer_s_configuration_is_good_and_asks_for_readiness(tmp_path: Path) -> None:
    module = script()
    with ExitStack() as stack:
        text = module.Cluster(tmp_path, module.Ports(18080), stack).balancer()
    (tmp_path / "haproxy.cfg").write_text(text)
    checked = subprocess.run(
        [shutil.which("haproxy") or "/usr/sbin/haproxy", "-c", "-f", tmp_path / "haproxy.cfg"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert re.findall(r"uri (\S+)", text) == ["/readyz", *["/readyz/reads"] * 3]


@pytest.mark.skipif("CLUSTER_SHOWN" not in os.environ, reason="a long form, of `make faults`")
def test_writes_go_on_within_ten_seconds_of_a_kill_and_none_is_lost() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--show", "--base-port", "0"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 writes were acknowledged, 0 of them are lost" in done.stdout
    found = re.search(r"writes went on after ([\d.]+) seconds", done.stdout)
    assert found is not None
    assert float(found[1]) < TAKEOVER_SECONDS

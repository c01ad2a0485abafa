"""Facts of the machine, from folders that stand for it and from the machine itself."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from fleetplane.node.host import proc
from fleetplane.node.host.proc import CpuUsage, address_towards


def test_the_address_towards_a_server_is_the_one_it_would_see() -> None:
    assert address_towards("127.0.0.1:1", socket.AF_INET) == "127.0.0.1"
    assert address_towards("127.0.0.1:1", socket.AF_INET6) == ""
    assert address_towards("nonsense", socket.AF_INET) == ""


def test_without_a_family_the_address_is_of_whichever_the_server_has() -> None:
    assert address_towards("127.0.0.1:1") == "127.0.0.1"
    assert address_towards("[::1]:1") == "::1"
    assert address_towards("127.0.0.1") == ""


def test_each_reader_of_usage_sees_what_passed_since_its_own_last_look(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    stat.write_text("cpu 100 0 100 800 0 0 0 0 50 0\nintr 5\n")
    often, seldom = CpuUsage(tmp_path), CpuUsage(tmp_path)
    assert (often.look(), seldom.look()) == ({}, {})
    stat.write_text("cpu 150 0 100 850 0 0 0 0 90 0\nintr 9\n")
    assert often.look() == {"cpu": 50.0}
    stat.write_text("cpu 150 0 100 950 0 0 0 0 90 0\nintr 9\n")
    assert (often.look(), seldom.look()) == ({"cpu": 0.0}, {"cpu": 25.0})


def test_memory_that_the_host_of_a_container_has_is_not_the_containers(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemFree: 40 kB\nMemAvailable: 900 kB\n")
    found = proc.memory(tmp_path)
    assert found is not None
    assert (found.total_bytes, found.used_bytes, found.used_percent) == (102_400, 61_440, 60.0)
    assert proc.memory(tmp_path / "nothing") is None


def test_the_machine_itself_is_read_as_psutil_reads_it() -> None:
    before, found, known = psutil.virtual_memory(), proc.memory(), psutil.virtual_memory()
    assert found is not None
    assert found.total_bytes == known.total
    # Others take memory and give it back meanwhile.
    there = sorted((before.available, known.available))
    assert 0.8 * there[0] <= found.available_bytes <= 1.2 * there[1]
    assert proc.memory_bytes() == pytest.approx(known.total, rel=0.1)
    assert proc.uptime_seconds() > 0
    own = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert 0 <= proc.running_seconds(own) <= proc.uptime_seconds()

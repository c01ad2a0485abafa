"""Packages of a board: what its owner allows, with a real apt and dpkg below a folder of the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import structlog
from domains.boards.agent.desired.test_desired_keeper import keeping, wanted
from support.boards.boards_rig import until
from support.boards.debian_root import DebianRoot

from fleetplane.domains.boards.agent.audit import BoardAuditLog
from fleetplane.domains.boards.agent.config import decode
from fleetplane.domains.boards.agent.desired import packages as apt
from fleetplane.domains.boards.agent.desired.packages import PackagePolicy, Packages, plan_of
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.debian import check_packages
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    SettingsError,
)

POLICY = PackagePolicy(allow=("sensor*", "probe"), timeout_seconds=120.0)


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[DebianRoot]:
    made = DebianRoot(tmp_path / "debian")
    with patch.object(apt, "ENVIRONMENT", {**apt.ENVIRONMENT, **made.environment}):
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> BoardIdentityFolder:
    made = BoardIdentityFolder(tmp_path / "state")
    made.make()
    return made


@pytest.fixture
def audit(folder: BoardIdentityFolder) -> Iterator[BoardAuditLog]:
    with BoardAuditLog(folder.audit, SystemClock(), structlog.get_logger()) as trail:
        yield trail


def packages(folder: BoardIdentityFolder, audit: BoardAuditLog, policy: PackagePolicy = POLICY) -> Packages:
    """As after a start of the agent: what it knows is on disk."""
    return Packages(policy, folder=folder, audit=audit, log=structlog.get_logger())


async def bring(made: Packages, **versions: str) -> dict[str, str]:
    """Have these; a _ in a name stands for -."""
    wanted = {name.replace("_", "-"): version for name, version in versions.items()}
    made.check(wanted)
    await made.install(wanted)
    await made.clear(wanted)
    return {one.name: one.version for one in made.applied()}


# What may be asked for.


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a",
        "-o",
        "--option",
        "a b",
        "a=1",
        "a/b",
        "a:arm64",
        "A1",
        "a1-",
        "g++",
        "a*",
        "a\n1",
        "a1;id",
        "../a1",
    ],
)
def test_a_word_that_apt_would_read_otherwise_is_no_name(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_packages([(name, "")])
    assert caught.value.field == "packages[0].name"


@pytest.mark.parametrize(
    "version", ["latest", "-1", "1 2", "1/2", "1=2", "1\n", "1*", "a:1", "1" * 200, "1;id"]
)
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_packages([("sensor", version)])
    assert caught.value.field == "packages[0].version"
    check_packages([("sensor", "1:2.0~rc1+dfsg-3+deb12u1"), ("lib32.x-y+z2", "")])


def test_too_many_packages_and_the_same_one_twice_are_refused() -> None:
    for given in ([("sensor", "")] * 2, [(f"s{number}", "") for number in range(33)]):
        with pytest.raises(InvalidArgument):
            check_packages(given)


def test_the_owner_names_packages_and_only_the_star_is_special() -> None:
    assert not PackagePolicy().allows("sensor")
    assert POLICY.allows("sensor-tools")
    assert not POLICY.allows("probes")
    assert not PackagePolicy(allow=("lib.x",)).allows("libax")
    for wrong in ({"allow": ["-o*"]}, {"allow": ["a|b"]}, {"allow": ["x1"], "timeout_seconds": 1}):
        with pytest.raises(SettingsError):
            decode({"packages": wrong})


def test_what_is_not_allowed_or_could_not_be_is_refused_with_its_reason(
    folder: BoardIdentityFolder, audit: BoardAuditLog
) -> None:
    with pytest.raises(PermissionDenied, match=r"packages\.allow names none"):
        packages(folder, audit, PackagePolicy()).check({"sensor": ""})
    made = packages(folder, audit)
    with pytest.raises(PermissionDenied, match="curl is not on the allow list"):
        made.check({"curl": ""})
    with patch.object(os, "geteuid", return_value=1000), pytest.raises(FailedPrecondition, match="not root"):
        made.check({"sensor": ""})
    with patch.object(apt, "APT_GET", "/nonexistent"), pytest.raises(FailedPrecondition, match="has no"):
        made.check({"sensor": ""})
    packages(folder, audit, PackagePolicy()).check({})


def test_a_plan_of_apt_is_read_line_by_line() -> None:
    said = (
        "Inst sensor [1.0] (2.0 local [all]) []\nInst lib:i386 (1:3-4 Debian:12/stable [i386])\n"
        "Remv old [1.0]\nConf sensor (2.0 local [all])\nPurg gone [1]\n"
    )
    plan = plan_of(said)
    assert plan.installed == {"sensor": "2.0", "lib:i386": "1:3-4"}
    assert set(plan.removed) == {"old", "gone"}


# With a real apt.


async def test_packages_come_change_and_go_back_to_what_was_there(
    debian: DebianRoot, folder: BoardIdentityFolder, audit: BoardAuditLog
) -> None:
    debian.add("sensor", "1.0")
    made = packages(folder, audit)
    assert await bring(made, sensor="") == {"sensor": "1.0"}, "lists were fetched, since none were there"
    assert debian.file("sensor") == "1.0"
    debian.add("sensor", "2.0")
    assert await bring(made, sensor="") == {"sensor": "1.0"}, "any version will do"
    assert await bring(made, sensor="2.0") == {"sensor": "2.0"}
    made = packages(folder, audit)
    assert await bring(made, sensor="") == {"sensor": "1.0"}, "the version that there was before"
    assert await bring(made) == {}
    assert debian.file("sensor") == "", "it was absent before, so it goes"
    assert msgspec.json.decode(folder.packages.read_bytes()) == {}
    assert b"Removing sensor" in folder.packages_log.read_bytes()
    assert "package_remove" in folder.audit.read_text()


async def test_a_package_that_was_there_is_never_removed_and_gets_its_version_again(
    debian: DebianRoot, folder: BoardIdentityFolder, audit: BoardAuditLog
) -> None:
    debian.add("probe", "1.0")
    debian.add("probe", "1.5")
    owner = packages(BoardIdentityFolder(folder.root / "owner"), audit)
    owner._folder.make()
    assert await bring(owner, probe="1.0") == {"probe": "1.0"}  # as if its owner had installed it
    made = packages(folder, audit)
    assert await bring(made, probe="") == {"probe": "1.0"}
    assert await bring(made) == {}
    assert debian.file("probe") == "1.0"
    assert await bring(made, probe="1.5") == {"probe": "1.5"}
    assert await bring(packages(folder, audit)) == {}
    assert debian.file("probe") == "1.0"


async def test_what_would_touch_anything_that_is_not_allowed_does_not_happen(
    debian: DebianRoot, folder: BoardIdentityFolder, audit: BoardAuditLog
) -> None:
    debian.add("stranger", "1.0")
    debian.add("sensor-lib", "1.0")
    debian.add("sensor", "1.0", depends="sensor-lib")
    debian.add("sensor-bad", "1.0", depends="stranger")
    debian.add("sensor-broken", "1.0", fails=True)
    made = packages(folder, audit)
    with pytest.raises(PermissionDenied, match="also change stranger"):
        await bring(made, sensor_bad="")
    assert not debian.file("sensor-bad")
    assert await bring(made, sensor="1.0") == {"sensor": "1.0"}
    assert debian.file("sensor-lib") == "1.0", "a dependency that is named as well"
    with pytest.raises(FleetplaneError, match=r"Version '9\.9' for 'sensor' was not found"):
        await bring(made, sensor="9.9")
    with pytest.raises(FleetplaneError, match=r"[Uu]nable to locate package sensor-none"):
        await bring(made, sensor="1.0", sensor_none="")
    with pytest.raises(FleetplaneError, match="E: "):
        await bring(made, sensor="1.0", sensor_broken="")
    assert b"it is not meant to be" in folder.packages_log.read_bytes(), "the output is kept"
    assert await bring(made, sensor="1.0") == {"sensor": "1.0"}
    withdrawn = packages(folder, audit, PackagePolicy(allow=("other",), timeout_seconds=120.0))
    assert await bring(withdrawn) == {}
    assert debian.file("sensor") == "1.0", "what its owner does not allow any more is left alone"
    assert await bring(packages(folder, audit)) == {}
    assert (debian.file("sensor"), debian.file("sensor-lib")) == ("", "")


async def test_who_is_not_root_asks_sudo_and_a_refusal_of_it_is_told(
    debian: DebianRoot, folder: BoardIdentityFolder, audit: BoardAuditLog, tmp_path: Path
) -> None:
    debian.add("sensor", "1.0")
    debian.update()
    sudo = tmp_path / "sudo"
    made = packages(folder, audit, PackagePolicy(allow=("sensor",), sudo=True, timeout_seconds=120.0))
    with patch.object(os, "geteuid", return_value=1000), patch.object(apt, "SUDO", str(sudo)):
        for script, is_let in (
            ("echo 'sudo: a password is required' >&2; exit 1", False),
            ('exec "$@"', True),
        ):
            sudo.write_text(f'#!/bin/sh\n[ "$1 $2" = "-n --" ] || exit 9\nshift 2\n{script}\n')
            sudo.chmod(0o755)
            if not is_let:
                with pytest.raises(FleetplaneError, match="a password is required"):
                    await bring(made, sensor="")
                assert not debian.file("sensor")
        assert await bring(made, sensor="") == {"sensor": "1.0"}


async def test_an_apt_that_does_not_end_is_ended_and_told_of(
    folder: BoardIdentityFolder, audit: BoardAuditLog, tmp_path: Path
) -> None:
    stuck = tmp_path / "apt-get"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    made = packages(folder, audit, PackagePolicy(allow=("no-such-package",), timeout_seconds=0.5))
    with patch.object(apt, "APT_GET", str(stuck)), pytest.raises(FleetplaneError, match="in its time"):
        await bring(made, no_such_package="")
    assert not folder.packages.exists(), "nothing was changed, so there is no way back to keep"


async def test_a_keeper_reports_packages_and_leaves_what_runs_alone_if_they_fail(
    debian: DebianRoot, tmp_path: Path
) -> None:
    debian.add("sensor", "1.0")
    async with keeping(tmp_path / "board", SimulatedBoard(), packages=POLICY) as keeper:
        first = wanted("1", ("/usr/bin/sleep", "1001"))
        first.packages.add(name="sensor", version="1.0")
        await keeper.take(first)
        await until(lambda: keeper.applied().version == "1")
        assert list(keeper.applied().packages) == [pb.AppliedPackage(name="sensor", version="1.0")]
        second = wanted("2", ("/usr/bin/sleep", "1002"))
        second.packages.add(name="sensor", version="2.0")
        await keeper.take(second)
        await until(lambda: "was not found" in keeper.applied().error)
        said = keeper.applied()
        assert (said.version, said.wanted) == ("", "2")
        assert [one.running for one in said.programs] == [True]
        debian.add("sensor", "2.0")
        await keeper.take(second)  # it is told to try again
        await until(lambda: keeper.applied().version == "2" and not keeper.applied().error)
        smuggled = wanted("3")
        smuggled.packages.add(name="--option=APT::Update::Pre-Invoke::=id", version="")
        await keeper.take(smuggled)
        assert "is no name of a package" in keeper.applied().error
        await keeper.take(pb.DesiredState())
        await until(lambda: not debian.file("sensor") and not keeper.applied().packages)

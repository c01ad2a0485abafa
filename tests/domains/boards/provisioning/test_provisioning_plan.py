"""The very commands, what a board is judged by, and what can be asked for."""

from __future__ import annotations

import shlex
import subprocess

import msgspec
import pytest

from fleetplane.domains.boards.kinds import BoardRole
from fleetplane.domains.boards.provisioning import plan, preflight
from fleetplane.domains.boards.provisioning.plan import BoardHost
from fleetplane.domains.boards.provisioning.policy import Installer, read
from fleetplane.domains.boards.provisioning.preflight import BoardPaths, Findings, edited_cmdline, judge
from fleetplane.kernel.errors import InvalidArgument

PI = BoardHost(address="10.0.0.7", user="pi")
ROOT = BoardHost(address="10.0.0.7", user="root")
INSTALLER = Installer(url="https://get.k3s.io", sha256="ab" * 32)
CURL = "curl --fail --silent --show-error --location --proto =https,file"
FETCHED = f"""set -eu
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
trap 'exit 129' HUP INT TERM
{CURL} https://get.k3s.io --output "$folder/install.sh"
echo "{"ab" * 32}  $folder/install.sh" | sha256sum -c - >/dev/null || {{
    echo 'the installer is not the one that is allowed: its SHA-256 differs' >&2; exit 1; }}
"""
FIT = Findings(
    architecture="aarch64",
    memory_bytes=4 * 1024**3,
    disk_bytes=20 * 1024**3,
    clock_seconds=1000.0,
    memory_cgroup=True,
    sudo=True,
)


def commands(steps: tuple[plan.CommandedStep, ...]) -> dict[str, tuple[str, ...]]:
    return {step.name: step.commands for step in steps if step.name not in ("preflight", "cgroup")}


def test_the_exact_commands_of_a_server() -> None:
    options = read({"tls_san": "pi.local, 10.0.0.9", "disable_components": "traefik"}, version="v1.31.4+k3s1")
    assert commands(plan.install(ROOT, BoardRole.MASTER, options, INSTALLER)) == {
        "reboot": ("reboot",),
        "packages": ("command -v curl >/dev/null || { apt-get update && apt-get install -y curl; }",),
        "install": (
            FETCHED
            + "env INSTALL_K3S_CHANNEL=stable INSTALL_K3S_SKIP_START=true INSTALL_K3S_VERSION=v1.31.4+k3s1"
            ' sh "$folder/install.sh" server --node-ip=10.0.0.7 --data-dir=/var/lib/rancher/k3s'
            " --advertise-address=10.0.0.7 --write-kubeconfig=/etc/rancher/k3s/k3s.yaml"
            " --write-kubeconfig-mode=600 --tls-san=pi.local --tls-san=10.0.0.9 --disable=traefik",
        ),
        "start": ("systemctl enable --now k3s",),
        "ready": ("k3s kubectl get nodes --no-headers",),
        "collect": (
            "cat -- /var/lib/rancher/k3s/server/node-token",
            "cat -- /etc/rancher/k3s/k3s.yaml",
        ),
        "verify": ("systemctl is-active k3s", "k3s --version"),
    }


def test_the_exact_commands_of_a_worker_and_no_secret_in_them() -> None:
    steps = plan.install(PI, BoardRole.WORKER, read({}), INSTALLER, server_url="https://10.0.0.1:6443")
    made = commands(steps)
    assert made["join-token"] == (
        (
            "sudo -n sh -c 'umask 077 && mkdir -p /etc/rancher/k3s"
            " && cat > /etc/rancher/k3s/fleetplane-join-token'"
        ),
    )
    (install,) = made["install"]
    assert shlex.split(install)[:4] == ["sudo", "-n", "sh", "-c"]
    assert shlex.split(install)[4] == FETCHED + (
        "env INSTALL_K3S_CHANNEL=stable INSTALL_K3S_SKIP_START=true"
        " K3S_TOKEN_FILE=/etc/rancher/k3s/fleetplane-join-token K3S_URL=https://10.0.0.1:6443"
        ' sh "$folder/install.sh" agent --node-ip=10.0.0.7 --data-dir=/var/lib/rancher/k3s'
    )
    assert made["start"] == ("sudo -n sh -c 'systemctl enable --now k3s-agent'",)
    assert "collect" not in made
    assert next(step for step in steps if step.name == "join-token").stdin == "cluster_token"


def test_the_exact_commands_that_take_it_all_back() -> None:
    assert commands(plan.uninstall(ROOT, read({}))) == {
        "stop": ("systemctl disable --now k3s", "systemctl disable --now k3s-agent"),
        "uninstall": (
            "if [ -x /usr/local/bin/k3s-uninstall.sh ]; then /usr/local/bin/k3s-uninstall.sh; fi",
            "if [ -x /usr/local/bin/k3s-agent-uninstall.sh ]; then /usr/local/bin/k3s-agent-uninstall.sh; fi",
        ),
        "clean": ("rm -rf -- /var/lib/rancher/k3s /etc/rancher/k3s",),
        "verify": ("! command -v k3s >/dev/null || { echo 'k3s is still there' >&2; exit 1; }",),
    }


@pytest.mark.parametrize(
    "value", ["node-label=a b", "node-label='; rm -rf /; echo '", "kubelet-arg=$(reboot)", "x=`id`", "a=\\"]
)
def test_whatever_stands_in_an_argument_stays_one_word(value: str) -> None:
    options = read({"extra_args": value})
    steps = plan.install(PI, BoardRole.WORKER, options, INSTALLER, server_url="https://10.0.0.1:6443")
    (outer,) = commands(steps)["install"]
    program, flag, shell, minus_c, inner = shlex.split(outer)
    assert (program, flag, shell, minus_c) == ("sudo", "-n", "sh", "-c")
    run = inner.splitlines()[-1]
    assert shlex.split(run)[-1] == f"--{value}"
    said = subprocess.run(
        ["sh", "-c", run.replace("env ", "printf '%s\\n' ", 1)], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines()[-1] == f"--{value}", "a real shell agrees"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"versoin": "v1"}, "k3s_config.versoin"),
        ({"version": "1.31; reboot"}, "k3s_config.version"),
        ({"channel": "stable && reboot"}, "k3s_config.channel"),
        ({"installer": "http://example.com/x.sh"}, "k3s_config.installer"),
        ({"data_dir": "relative"}, "k3s_config.data_dir"),
        ({"data_dir": "/var/../etc"}, "k3s_config.data_dir"),
        ({"cluster_cidr": "10.42.0.0/99"}, "k3s_config.cluster_cidr"),
        ({"cluster_dns": "ten"}, "k3s_config.cluster_dns"),
        ({"tls_san": "a b"}, "k3s_config.tls_san"),
        ({"disable_components": "traefik;reboot"}, "k3s_config.disable_components"),
        ({"extra_args": "--flag"}, "k3s_config.extra_args"),
        ({"kubeconfig_mode": "rw"}, "k3s_config.kubeconfig_mode"),
        ({"kubeconfig_mode": "644"}, "k3s_config.kubeconfig_mode"),
        ({"cluster_domain": "x\ny"}, "k3s_config.cluster_domain"),
        ({"flannel_backend": "v" * 2000}, "k3s_config.flannel_backend"),
        ({"server_url": "http://10.0.0.1:6443"}, "k3s_config.server_url"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_name(given: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        read(given)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architecture": "mips"}, "architecture"),
        ({"memory_bytes": 512 * 1024**2}, "memory"),
        ({"disk_bytes": 100 * 1024**2}, "disk"),
        ({"clock_seconds": 0.0}, "clock"),
        ({"clock_seconds": 2000.0}, "ahead"),
        ({"sudo": False}, "privileges"),
        ({"memory_cgroup": False}, "cgroup"),
        ({"listening": (22, 6443)}, "6443"),
    ],
)
def test_a_board_that_is_not_fit_is_told_why(change: dict[str, object], word: str) -> None:
    verdict = judge(msgspec.structs.replace(FIT, **change), server=True, now_seconds=1000.0)
    assert any(word in problem for problem in verdict.problems)


def test_a_fit_board_has_no_problems_and_a_card_is_warned_of() -> None:
    assert judge(FIT, server=True, now_seconds=1030.0).problems == ()
    card = msgspec.structs.replace(FIT, root_device="/dev/mmcblk0p2")
    assert "SD card" in judge(card, server=True, now_seconds=1000.0).warnings[0]
    assert judge(card, server=False, now_seconds=1000.0).warnings == ()


def test_a_missing_memory_controller_can_be_turned_on() -> None:
    off = msgspec.structs.replace(FIT, memory_cgroup=False, cmdline="/boot/cmdline.txt")
    verdict = judge(off, server=True, now_seconds=1000.0)
    assert (verdict.problems, verdict.needs_cgroup) == ((), True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("console=tty1 rootwait\n", "console=tty1 rootwait cgroup_memory=1 cgroup_enable=memory\n"),
        ("console=tty1\ncgroup_enable=memory\n", "console=tty1 cgroup_memory=1 cgroup_enable=memory\n"),
        ("a cgroup_disable=memory b\n", "a b cgroup_memory=1 cgroup_enable=memory\n"),
        ("a cgroup_memory=0\n", "a cgroup_memory=1 cgroup_enable=memory\n"),
        ("a cgroup_memory=1 cgroup_enable=memory\n", None),
    ],
)
def test_the_boot_loaders_line_stays_one_line(before: str, after: str | None) -> None:
    assert edited_cmdline(before) == after


def test_the_probe_runs_in_a_plain_shell_and_is_understood() -> None:
    said = subprocess.run(
        ["sh", "-c", preflight.probe(BoardPaths())], capture_output=True, text=True, check=True
    ).stdout
    found = preflight.read(said)
    assert found.architecture
    assert found.memory_bytes > 2**20
    assert found.disk_bytes > 0
    assert found.clock_seconds > 1.7e9
    assert found.hostname


def test_output_of_somebody_else_does_not_confuse_the_reader() -> None:
    found = preflight.read("motd: hello\nmemory_kb=lots\narchitecture=aarch64\narchitecture=evil\nx" * 3)
    assert (found.architecture, found.memory_bytes) == ("aarch64", 0)

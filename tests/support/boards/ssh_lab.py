"""A real `sshd` on loopback whose sessions see a board that is not there: stand-ins for what k3s needs.

Logging in as whoever runs the tests. Programs that would change the machine (`apt-get`, `systemctl`,
`reboot`, `k3s`) are scripts in a folder that comes first on the sessions' PATH; all of them write down
how they were called.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh
from support.shared.free_ports import free_port

from fleetplane.domains.boards.provisioning.policy import PATHS, Installer, ProvisioningPolicy
from fleetplane.domains.boards.provisioning.preflight import BoardPaths
from fleetplane.domains.boards.provisioning.secrets import SshCredential

SSHD = "/usr/sbin/sshd"
TOKEN = "K10abc::server:very-secret"
START_SECONDS = 60.0

_STAND_INS = {
    "apt-get": 'echo "apt-get $*" >> "$LAB/calls"',
    "sudo": 'shift; exec "$@"',
    "systemctl": 'echo "systemctl $*" >> "$LAB/calls"; [ "$1" != is-active ] || cat "$LAB/active"',
    "reboot": (
        'echo reboot >> "$LAB/calls"; cp "$LAB/controllers.after" "$LAB/controllers";'
        # Last, and as a whole: who sees another boot looks at once at what has changed with it.
        ' cat /proc/sys/kernel/random/uuid > "$LAB/boot_id.new"; mv "$LAB/boot_id.new" "$LAB/boot_id"'
    ),
    "ss": "true",
}
_INSTALLER = """#!/bin/sh
set -e
echo "$0" > "$LAB/installer-was"
[ ! -e "$LAB/slow" ] || { echo begun; sleep 240; }
[ ! -e "$LAB/broken" ] || { echo "the download failed" >&2; exit 7; }
env | grep -E '^(INSTALL_K3S|K3S_)' | sort > "$LAB/environment"
printf '%s\\n' "$@" > "$LAB/arguments"
mkdir -p "$LAB/data/server" "$LAB/etc"
echo "@TOKEN@" > "$LAB/data/server/node-token"
echo "kind: Config" > "$LAB/etc/k3s.yaml"
cat > "$LAB/bin/k3s" <<'TXT'
#!/bin/sh
case "$1" in
--version) echo "k3s version v1.31.4+k3s1 (abc)"; echo "go version go1.22" ;;
kubectl) echo "board-1 Ready control-plane 1m v1.31.4+k3s1" ;;
esac
TXT
chmod +x "$LAB/bin/k3s"
"""


class SshLab:
    def __init__(self, folder: Path, port: int, key: asyncssh.SSHKey, host_key: asyncssh.SSHKey) -> None:
        self.folder = folder
        self.port = port
        self._key = key
        self._host_key = host_key
        self.places = BoardPaths(
            cgroup_controllers=str(folder / "controllers"),
            cgroups=str(folder / "no-cgroups"),
            cmdlines=(str(folder / "cmdline.txt"),),
            disk=str(folder),
            boot_id=str(folder / "boot_id"),
            configuration=str(folder / "etc"),
            programs=str(folder / "bin"),
            mark=str(folder / "mark"),
        )
        self.options = {
            "installer": f"file://{folder}/installer.sh",
            "data_dir": str(folder / "data"),
            "write_kubeconfig": str(folder / "etc/k3s.yaml"),
        }

    @property
    def policy(self) -> ProvisioningPolicy:
        """What the server's owner allows: the stand-in for the installer as it is now, and this folder."""
        checksum = hashlib.sha256((self.folder / "installer.sh").read_bytes()).hexdigest()
        return ProvisioningPolicy(
            installers=(Installer(url=self.options["installer"], sha256=checksum),),
            paths=(str(self.folder), *PATHS),
        )

    @property
    def host_key(self) -> str:
        return self._host_key.export_public_key().decode()

    @property
    def known_hosts(self) -> str:
        return f"[127.0.0.1]:{self.port} {self.host_key}"

    def credential(
        self, *, known_hosts: str | None = None, key: asyncssh.SSHKey | None = None
    ) -> SshCredential:
        return SshCredential(
            user=getpass.getuser(),
            port=self.port,
            private_key=(key or self._key).export_private_key().decode(),
            known_hosts=self.known_hosts if known_hosts is None else known_hosts,
        )

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@contextmanager
def ssh_lab(folder: Path) -> Iterator[SshLab]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bin").mkdir()
    for name, script in _STAND_INS.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    key, host_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    port = free_port()
    lab = SshLab(folder, port, key, host_key)
    lab.write("installer.sh", _INSTALLER.replace("@TOKEN@", TOKEN))
    lab.write("controllers", "cpuset cpu io memory pids\n")
    lab.write("controllers.after", "cpuset cpu io memory pids\n")
    lab.write("cmdline.txt", "console=tty1 root=PARTUUID=1 rootwait\n")
    lab.write("boot_id", "first\n")
    lab.write("active", "active\n")
    (folder / "host_key").write_bytes(host_key.export_private_key())
    (folder / "host_key").chmod(0o600)
    lab.write("authorized", key.export_public_key().decode())
    lab.write("sshd_config", _config(folder, port))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
    with subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE
    ) as process:
        try:
            _until_open(port, process)
            yield lab
        finally:
            process.terminate()


def _config(folder: Path, port: int) -> str:
    return (
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"SetEnv PATH={folder}/bin:/usr/bin:/bin LAB={folder}\n"
    )


def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            assert process.stderr is not None
            raise RuntimeError(f"sshd ended: {process.stderr.read().decode()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError("sshd does not listen")

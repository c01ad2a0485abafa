"""A Debian below a folder: real apt and dpkg, a repository of tiny packages beside it, and nothing else.

Nothing of the machine is read or changed but the programs themselves: their configuration, lists and state
lie below the folder, and the only source is `file:`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

CONFIG = """\
Dir "{root}/";
Dir::State::status "{root}/var/lib/dpkg/status";
DPkg::Options {{ "--root={root}"; "--force-not-root"; "--force-script-chrootless"; }};
DPkg::Run-Directory "/";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Sandbox::User "root";
Acquire::Languages "none";
"""


class DebianRoot:
    def __init__(self, folder: Path) -> None:
        self.root, self._repository = folder / "root", folder / "repository"
        dpkg = self.root / "var/lib/dpkg"
        for made in (
            dpkg / "info",
            dpkg / "updates",
            dpkg / "triggers",
            self.root / "etc/apt/apt.conf.d",
            self.root / "etc/apt/preferences.d",
            self.root / "etc/apt/trusted.gpg.d",
            self.root / "var/lib/apt/lists/partial",
            self.root / "var/cache/apt/archives/partial",
            self.root / "var/log/apt",
            self._repository,
        ):
            made.mkdir(parents=True)
        (dpkg / "status").touch()
        (dpkg / "available").touch()
        source = f"deb [trusted=yes] file:{self._repository} ./\n"
        (self.root / "etc/apt/sources.list").write_text(source)
        self._config = folder / "apt.conf"
        self._config.write_text(CONFIG.format(root=self.root))
        self.publish()

    @property
    def environment(self) -> Mapping[str, str]:
        """What apt and dpkg are to be run with."""
        return {"APT_CONFIG": str(self._config), "DPKG_ADMINDIR": str(self.root / "var/lib/dpkg")}

    def add(self, name: str, version: str, *, depends: str = "", fails: bool = False) -> None:
        """Build a package and put it into the repository."""
        tree = self._repository / f"{name}-{version}"
        control = tree / "DEBIAN"
        control.mkdir(parents=True, mode=0o755)
        fields = {
            "Package": name,
            "Version": version,
            "Architecture": "all",
            "Maintainer": "Nobody <nobody@example.invalid>",
            "Description": "a test",
        } | ({"Depends": depends} if depends else {})
        (control / "control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
        if fails:
            script = control / "preinst"
            script.write_text("#!/bin/sh\necho it is not meant to be >&2\nexit 1\n")
            script.chmod(0o755)
        content = tree / "usr/share" / name
        content.mkdir(parents=True)
        (content / "version").write_text(version)
        made = self._repository / f"{name}_{version.replace(':', '%3a')}_all.deb"
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(made)],
            check=True,
            capture_output=True,
        )
        self.publish()

    def publish(self) -> None:
        """Write the list of what there is; who has read it before does not know of what is new."""
        stanzas = []
        for deb in sorted(self._repository.glob("*.deb")):
            shown = subprocess.run(
                ["dpkg-deb", "--field", str(deb)], check=True, capture_output=True, text=True
            ).stdout
            content = deb.read_bytes()
            stanzas.append(
                f"{shown.rstrip()}\nFilename: ./{deb.name}\nSize: {len(content)}\n"
                f"SHA256: {hashlib.sha256(content).hexdigest()}\n"
            )
        (self._repository / "Packages").write_text("\n".join(stanzas))

    def update(self) -> None:
        """Read the list of what there is."""
        environment = {**os.environ, **self.environment}
        subprocess.run(["apt-get", "update"], check=True, capture_output=True, env=environment)

    def file(self, name: str) -> str:
        """The version that lies in the file system; empty if the package does not."""
        path = self.root / "usr/share" / name / "version"
        return path.read_text() if path.exists() else ""

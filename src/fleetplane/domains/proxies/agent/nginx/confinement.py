"""Where foreign configurations are tested: which walls stand on this machine, and NGINX behind them."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.agent.nginx import sandbox
from fleetplane.domains.proxies.agent.nginx.running import run

_READABLE: Final = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
    "/dev/urandom",
)
"""What any program needs to start: its libraries, and random numbers."""
_WRITABLE: Final = ("/dev/null",)
_ENVIRONMENT: Final = {"OPENSSL_CONF": "/dev/null"}
_USERS: Final = ("nobody", "daemon", "bin")
NONE: Final = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxAccount:
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    walls: frozenset[str]
    """`user`, `landlock`, `seccomp`: those that were seen to hold."""
    account: SandboxAccount | None = None
    """The user that tests run as, where the agent is root."""
    without: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return sandbox.enough(set(self.walls))

    @property
    def words(self) -> str:
        """For the agent's status and capabilities."""
        return "+".join(sorted(self.walls)) if self.holds else NONE

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder for one test, ours alone until it is handed over."""
        made = Path(tempfile.mkdtemp(prefix="fleetplane-test-"))
        try:
            (made / "logs").mkdir()
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def hand_over(self, folder: Path) -> None:
        """Hand a complete folder over to the user of the test; the agent writes nothing to it afterwards.

        The folder comes last: before that nobody else can put a link in our way.
        """
        if self.account is not None:
            for path in (*folder.iterdir(), folder):
                os.chown(path, self.account.uid, self.account.gid, follow_symlinks=False)

    async def run(self, program: Path, *arguments: str, folder: Path) -> tuple[int, str]:
        """Exit code and output of a program that can read itself, its libraries and this folder."""
        prefix = self._prefix(read=(str(program),), write=(str(folder),))
        return await run(*prefix, "--", str(program), *arguments, environment=_ENVIRONMENT)

    def _prefix(self, *, read: Sequence[str] = (), write: Sequence[str] = ()) -> list[str]:
        own = [sys.executable, "-I", "-S", sandbox.__file__]
        if self.account is not None:
            own += ["--uid", str(self.account.uid), "--gid", str(self.account.gid)]
        for option, paths in (
            ("--read", (*_READABLE, *read)),
            ("--write", (*_WRITABLE, *write)),
            ("--without", self.without),
        ):
            own += [word for path in paths for word in (option, path)]
        return own

    @classmethod
    async def probe(cls, *, avoid: Collection[int] = (), without: tuple[str, ...] = ()) -> Confinement:
        """What this machine offers, found by running into each wall; `avoid` are users not to become."""
        account = _account(avoid) if os.geteuid() == 0 else None
        trial = cls(walls=frozenset(), account=account, without=without)
        code, output = await run(*trial._prefix(), "--probe", environment=_ENVIRONMENT)
        walls = frozenset(output.split()) & {"user", "landlock", "seccomp"} if code == 0 else frozenset()
        return cls(walls=walls, account=account, without=without)


def _account(avoid: Collection[int]) -> SandboxAccount | None:
    for name in _USERS:
        with contextlib.suppress(KeyError):
            found = pwd.getpwnam(name)
            if found.pw_uid not in (0, *avoid):
                return SandboxAccount(uid=found.pw_uid, gid=found.pw_gid)
    return None

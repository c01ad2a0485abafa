"""Tests of foreign configurations: the sandbox that this machine allows, and the user of NGINX's workers.

A worker answers strangers, so it must not be able to read private keys or the agent's credential. Where the
agent is root, the master reads the keys and its workers are another user, to whom the state directory is
closed. Without root there is one user for all of it, and no such wall.
"""

from __future__ import annotations

import contextlib
import grp
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
from fleetplane.kernel.errors import SettingsError

USUAL_USERS: Final = ("www-data", "nginx", "http", "nobody")
"""Of web servers, in common distributions."""


def worker_user(given: str) -> str:
    """`user:group` for NGINX; empty where the agent is no root and cannot choose."""
    if os.geteuid() != 0:
        if given:
            raise SettingsError(
                f"--worker-user {given}: only an agent that runs as root can choose another user"
            )
        return ""
    for name in (given,) if given else USUAL_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid == 0:
            raise SettingsError(
                "--worker-user must not be root", hint="name a user with no rights of its own"
            )
        return f"{name}:{_group(entry.pw_gid)}"
    raise SettingsError(
        f"there is no user {given or ' or '.join(USUAL_USERS)} for NGINX's workers",
        hint="make one and name it with --worker-user",
    )


def _group(identity: int) -> str:
    return grp.getgrgid(identity).gr_name


def user_ids(user: str) -> tuple[int, ...]:
    return (pwd.getpwnam(user.partition(":")[0]).pw_uid,) if user else ()


def work_folder(state: Path, given: Path | None, *, managed: bool) -> Path | None:
    """None where workers are the agent's own user: NGINX was started by an agent that is no root."""
    if managed and os.geteuid() != 0:
        return None
    work = given.absolute() if given is not None else state.with_name(f"{state.name}-work")
    if work.is_relative_to(state) or state.is_relative_to(work):
        raise SettingsError("--work-dir must lie outside the state directory, which is closed to workers")
    return work


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

"""The user that NGINX's workers run as, and the folders they may write to.

A worker answers strangers, so it must not be able to read private keys or the agent's credential.
Where the agent is root, the master reads the keys and its workers are somebody else, to whom the state
directory is closed. Without root there is one user for all of it, and no such wall.
"""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from typing import Final

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

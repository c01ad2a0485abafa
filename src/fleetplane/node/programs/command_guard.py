"""Runs one program for the agent, and lets nothing of it outlive its time. A program of its own.

    guard STATUS_FD REQUEST_FD

It is started anew for each command, by the interpreter alone and without any of our modules, because
what it does between fork and exec must not happen in a process that has threads. From REQUEST_FD it
reads what to run. It makes itself the parent of every orphan below it, runs the program under limits and
as the user it was told, waits, and then ends whatever the program left behind, also what has made a
session of its own to get away, unless the request says that such processes may go. TERM ends everything
politely, then not; a second TERM means now. On STATUS_FD it says how the program ended, or why it could not
begin.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # a third of the time that this program takes to start would be spent there
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
WATCHED = {signal.SIGCHLD, signal.SIGTERM}
LINGER_SECONDS = 0.5
"""Between TERM and KILL for what a program left behind."""
LOOK_SECONDS = 0.02
SWEEP_SECONDS = 5.0
"""For processes that fork while they are being killed; the limit on their number ends that race."""


def main() -> None:
    # From here on they are only ever looked for, so none can come between looking and waiting.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    status_fd, request_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(request_fd, "rb") as stream:
        request = marshal.load(stream)  # noqa: S302  # from our parent, through memory that nobody else has
    os.set_inheritable(status_fd, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != request["parent"]:
        os._exit(1)  # whoever started us is gone already
    child = os.fork()
    if child == 0:
        become(request, status_fd)
    session = child if request["may_detach"] else 0
    status, hurried = wait(child, request["term_seconds"], session)
    sweep(session, hurried=hurried)
    tell(status_fd, f"ended {status}")


def become(request: dict[str, Any], status_fd: int) -> None:
    """The child: everything that was ours is given up, then the program takes over. Never returns."""
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by the interpreter
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        for name, limit in request["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        if request["uid"] is not None:
            os.setgroups(request["groups"])
            os.setresgid(request["gid"], request["gid"], request["gid"])
            os.setresuid(request["uid"], request["uid"], request["uid"])
        if request["no_new_privileges"]:
            prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if request["umask"] is not None:
            os.umask(request["umask"])
        os.chdir(request["folder"])
        os.execve(request["program"], request["argv"], request["environment"])  # noqa: S606  # that is its job
    except (OSError, ValueError) as error:
        words = " ".join(str(error).split())
        tell(status_fd, f"failed {getattr(error, 'errno', 0) or 0} {words}")
    finally:
        os._exit(127)


def wait(child: int, term_seconds: float, session: int) -> tuple[int, bool]:
    """The child's status as `waitpid` returns it, and whether we were asked to end it."""
    kill_at: float | None = None
    while True:
        if kill_at is None:
            if signal.sigwaitinfo(WATCHED).si_signo == signal.SIGTERM:
                kill_at = time.monotonic() + term_seconds
                everyone(signal.SIGTERM, session)
        else:
            seen = signal.sigtimedwait(WATCHED, LOOK_SECONDS)
            if seen is not None and seen.si_signo == signal.SIGTERM:
                kill_at = time.monotonic()
            if time.monotonic() >= kill_at:
                everyone(signal.SIGKILL, session)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status, kill_at is not None
            if pid == 0:
                break


def sweep(session: int, *, hurried: bool) -> None:
    """End all that is left, politely if nobody is in a hurry, and within a bound."""
    started = time.monotonic()
    kill_at = started if hurried else started + LINGER_SECONDS
    everyone(signal.SIGTERM, session)
    while time.monotonic() < started + SWEEP_SECONDS:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # nobody is left
        if session and not descendants(os.getpid(), session):
            return  # those who are left have a session of their own, and may
        if time.monotonic() >= kill_at:
            everyone(signal.SIGKILL, session)
        time.sleep(LOOK_SECONDS)


def everyone(number: int, session: int) -> None:
    """Signal all descendants, parents before their children; of one session, if one is given."""
    for pid in descendants(os.getpid(), session):
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def descendants(root: int, session: int) -> list[int]:
    """All processes below one; of one session, with the process that leads it, if one is given."""
    children: dict[int, list[int]] = {}
    sessions: dict[int, int] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  # no imports that are not needed here
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
                parent, sessions[int(entry)] = int(fields[1]), int(fields[3])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return [pid for pid in found if not session or session in (pid, sessions[pid])]


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def tell(descriptor: int, what: str) -> None:
    os.write(descriptor, what.encode(errors="replace") + b"\n")


if __name__ == "__main__":
    main()

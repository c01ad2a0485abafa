"""A lock on the board itself: of several servers, one runs commands there at a time. Pure.

An operation that a server was at when it died is taken over by the next one, while its last command may still
run on the board; and a server that was only stopped goes on with its next command when it wakes. So each
command that changes something is run under a lock in the home of whoever logs in, and a file beside the lock
says under whose order the last one was run. A newer owner waits for the command of an older one; an older one
does nothing any more.
"""

from __future__ import annotations

import shlex

from fleetplane.domains.boards.fences import Fence

OVERTAKEN = 97
"""Exit code: a newer owner has run something here."""
BUSY = 98
"""Exit code: what another one runs here did not end in time."""


def guarded(command: str, *, fence: Fence, operation: str, mark: str, wait_seconds: float) -> str:
    """The command under the lock; `mark` is where the file lies, from the home or from the root."""
    file = shlex.quote(mark)
    lineage, said = shlex.quote(fence.lineage), shlex.quote(f"{fence.lineage} {fence.revision} {operation}")
    inside = "\n".join(
        (
            "lineage= revision=",
            f"[ ! -e {file} ] || read -r lineage revision rest < {file}",
            f'if [ "$lineage" = {lineage} ] && [ "$revision" -gt {fence.revision} ] 2>/dev/null; then',
            "    echo 'another server has taken the operation over' >&2",
            f"    exit {OVERTAKEN}",
            "fi",
            f"printf '%s\\n' {said} > {file}.new && mv -- {file}.new {file} || exit 1",
            command,
        )
    )
    # The lock stays with flock: what a command leaves running in the background does not keep it.
    lock = shlex.join(["flock", "-o", "-w", f"{wait_seconds:.0f}", "-E", str(BUSY), f"{mark}.lock"])
    return f"(umask 077; : >> {file}.lock) && exec {lock} sh -c {shlex.quote(inside)}"

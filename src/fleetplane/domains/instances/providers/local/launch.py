"""Start a program that outlives its parent: `launch.py DIRECTORY PROGRAM [ARGUMENT...]`.

Run as a script by `local`, with `python -I -S`, so that it starts in a few milliseconds; it
imports nothing of ours. It forks and ends, which makes the program a child of the init process: nobody here
has to reap it, and the death of the server does not reach it. The fork leads a session of its own, so
that one signal reaches all it starts.

The fork writes down its own process id *before* it becomes the program. Whoever finds no such
file knows that nothing was started, whenever the server was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys

PROCESS_FILE = "process.json"
LOG_FILE = "agent.log"


def main(directory: str, command: list[str]) -> None:
    os.chdir(directory)
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the interpreter ignores it, and programs inherit that
    note_process()
    try:
        os.execvp(command[0], command)  # noqa: S606  # the operator's own command, no shell
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error}\n")
        os._exit(127)


def note_process() -> None:
    """Write who we are, durably enough for a killed server: all of it or nothing."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        # The second field is a name in parentheses, which may hold anything; the 22nd is the start time.
        start_ticks = int(file.read().rpartition(")")[2].split()[19])
    fresh = f"{PROCESS_FILE}.new"
    with open(fresh, "w", encoding="ascii") as file:  # noqa: PTH123
        json.dump({"pid": os.getpid(), "start_ticks": start_ticks}, file)
    os.rename(fresh, PROCESS_FILE)  # noqa: PTH104  # pathlib costs more than all the rest


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

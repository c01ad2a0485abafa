"""Calling a function in a process of its own, which takes the memory of its libraries with it when it ends.

For work that an agent does seldom and that needs a large library, such as looking at certificates. The
function is found by its name there, so it must be importable; arguments and result are pickled. It costs
the start of an interpreter: some tenths of a second. It ends with whoever started it, so that nothing is
written behind the back of an agent that was started anew.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar, cast

from fleetplane.kernel.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")

PR_SET_PDEATHSIG: Final = 1
LIMIT_SECONDS: Final = 120.0
"""A function that took longer hangs, or the machine does."""


class CallFailed(Unavailable):
    """There was no process to call the function in, or it died: not the function's own failure."""

    reason = "CALL_FAILED"


def call_elsewhere(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The function's result, or what it raised there; CallFailed if there was neither. Blocks."""
    asked = pickle.dumps((function, args, kwargs))
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=LIMIT_SECONDS, check=False)  # noqa: S603
        returned, value = _answer(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        words = f"{function.__qualname__} could not be called in a process of its own: {error}"
        raise CallFailed(words) from error
    if not returned:
        raise cast("BaseException", value)
    return cast("R", value)


def _answer(pickled: bytes) -> tuple[bool, Any]:
    """Raises ValueError unless it is a whole answer; what unpickling itself raises is up to the classes."""
    try:
        returned, value = pickle.loads(pickled)  # noqa: S301  # from a process of our own, by a pipe
    except Exception as error:
        raise ValueError(f"its answer cannot be read: {error}") from error
    return returned, value


def main() -> None:
    """Answer one call from standard input on standard output, which the function itself cannot write to."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return  # whoever started us is gone already
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, args, kwargs = pickle.load(sys.stdin.buffer)  # noqa: S301  # from whoever started us
    answer: tuple[bool, Any]
    try:
        answer = (True, function(*args, **kwargs))
    except Exception as error:
        answer = (False, error)
    with answers:
        pickle.dump(answer, answers)


if __name__ == "__main__":
    main()

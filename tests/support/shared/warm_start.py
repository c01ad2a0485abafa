"""Processes of `fleetplane` that need not import the product anew: most of what starting one costs.

A process that has imported everything and done nothing yet stands ready, one for each process of tests. Asked
for a command, it forks, and its child becomes that command: with the arguments, environment, folder and
streams that it would have been started with, a process number of its own, and nothing shared with anybody but
the seed of hashes, and RSA keys, of which there are some in a row: servers that are started one after another
have others. It ends when whoever asked for it does, also if that was killed.
What depends on how an interpreter begins has another to come from, if it is wanted more than once; whatever
has a program in front of it, or looks at what is loaded, is started as everybody starts it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric import rsa
from support.shared.ready_keys import ReadyKeys

COMMAND = [sys.executable, "-m", "fleetplane.cli.main"]
REQUEST_BYTES = 150_000
"""Below what the kernel takes as one message."""
LOOK_SECONDS = 0.01
OF_INTERPRETERS = (
    *("PYTHON", "LD_", "MALLOC", "GRPC_", "OPENSSL_", "SSL_", "HOLD_BACK", "UVLOOP_"),
    *("LANG", "LC_", "TZ", "TMPDIR"),
)
"""Beginnings of variables that are looked at when a program is loaded, and not when it works."""
OF_STREAMS = "PYTHONUNBUFFERED"
"""Whoever starts one of these has buffered streams, as a shell would give them."""

LEFT_OUT = ("gen.", "migrations.")
"""Modules of ours that are run by somebody else, or come with those that use them."""
LATE = ("litestar.plugins.pydantic", "litestar.plugins.attrs", "sqlalchemy.dialects.sqlite.aiosqlite")
"""Modules of others that they import themselves when they begin to work."""

HANDED_ON = frozenset({"stdin", "stdout", "stderr", "env", "cwd", "text"})
"""Options of `Popen` that a process has from one that stands ready, too."""
PR_SET_PDEATHSIG = 1

OF_A_SERVER = 2
"""RSA keys that a server makes when it first starts."""


class _Starter:
    """The process that stands ready, as seen by whoever asks it."""

    def __init__(self, deciding: Mapping[str, str]) -> None:
        others = {name: value for name, value in os.environ.items() if not name.startswith(OF_INTERPRETERS)}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_at_a_time = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**others, **deciding},
            )
        atexit.register(self._end)

    def ask(self, request: Mapping[str, object], streams: Sequence[int] = ()) -> int | None:
        message = json.dumps(request).encode()
        with self._one_at_a_time:
            socket.send_fds(self._control, [message], streams)
            answer = self._control.recv(REQUEST_BYTES)
        assert answer, "the process that starts others has ended"
        return cast("int | None", json.loads(answer))

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


_starters: dict[tuple[tuple[str, str], ...], _Starter] = {}
"""By what an interpreter's variables are."""
_asked_for: Counter[tuple[tuple[str, str], ...]] = Counter()
_one_at_a_time = threading.Lock()


def _starter(environment: Mapping[str, str]) -> _Starter | None:
    """The one whose interpreter began as one would in this environment.

    None if that is another than tests have themselves, and asked for the first time: it may be the last.
    """
    deciding, usual = _deciding(environment), _deciding(os.environ)
    with _one_at_a_time:
        _asked_for[deciding] += 1
        if deciding != usual and _asked_for[deciding] < 2:
            return None
        if deciding not in _starters:
            _starters[deciding] = _Starter(dict(deciding))
        return _starters[deciding]


def _deciding(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    found = (pair for pair in environment.items() if pair[0].startswith(OF_INTERPRETERS))
    return tuple(sorted(pair for pair in found if pair[0] != OF_STREAMS))


class _WarmProcess(subprocess.Popen[str]):
    """A `Popen` whose process is another's child, which is asked how it ended."""

    def __init__(self, starter: _Starter, command: Sequence[str], **options: Any) -> None:
        self._starter = starter
        super().__init__(command, **options)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *pipes = given
        ends = pipes[:6]
        request = {
            "arguments": [os.fspath(argument) for argument in args],
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or Path.cwd()),
        }
        try:
            streams = [number if end == -1 else end for number, end in enumerate(ends[i] for i in (0, 3, 5))]
            pid = self._starter.ask(request, streams)
            assert pid is not None
            self.pid = pid
            self._child_created = True
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        while (status := self._starter.ask({"ended": self.pid})) is None:
            if wait_flags & os.WNOHANG:
                return 0, 0
            time.sleep(LOOK_SECONDS)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            except (AssertionError, OSError):
                if _deadstate is None:
                    raise
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Like `Popen` with text for streams: from what stands ready if the command is ours and allows it."""
    options["text"] = True
    environment = options.get("env")
    is_plain = _is_ours(command) and options.keys() <= HANDED_ON
    starter = _starter(os.environ if environment is None else environment) if is_plain else None
    if starter is None:
        return subprocess.Popen(command, **options)
    return _WarmProcess(starter, command, **options)


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` that captures text."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **streams, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _is_ours(command: Sequence[str]) -> bool:
    return list(command[: len(COMMAND)]) == COMMAND


# In the process that stands ready.


def _import_everything() -> None:
    import fleetplane

    for module in pkgutil.walk_packages(fleetplane.__path__, "fleetplane."):
        if not any(f".{left_out}" in module.name for left_out in LEFT_OUT):
            with suppress(ImportError):  # of what only some machines have
                importlib.import_module(module.name)
    for late in LATE:
        importlib.import_module(late)


def _asked(control: socket.socket, keys: ReadyKeys) -> bool:
    """Answer until there is nobody left to ask. True in a child, which is to be what was asked for."""
    own = os.getpid()
    while True:
        message, streams, _, _ = socket.recv_fds(control, REQUEST_BYTES, 3)
        if not message:
            return False
        request = json.loads(message)
        answer: int | None
        if "ended" in request:
            answer, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = status if answer else None
        else:
            keys.skip(OF_A_SERVER)
            answer = os.fork()
            if not answer:
                control.close()
                _end_with(own)
                _become(request, streams)
                return True
            for stream in streams:
                os.close(stream)
        control.send(json.dumps(answer).encode())


def _end_with(parent: int) -> None:
    """Whoever kills a run of tests kills nothing else: its servers would work on, for nobody."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before that was said
        os._exit(1)


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    from fleetplane.cli import main

    sys.argv = [main.__file__, *request["arguments"][len(COMMAND) :]]


def _work() -> None:
    """Run the command and end as an interpreter does, but for taking everything apart that was imported."""
    from fleetplane.cli.main import main

    code = 1
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_everything()
    keys = ReadyKeys()
    keys.fill()
    rsa.generate_private_key = keys.generate
    gc.collect()
    gc.freeze()
    if _asked(socket.socket(fileno=int(sys.argv[1])), keys):
        _work()

"""Run a program where it reads only what it is given and reaches nobody: a small program of its own.

Started by `confinement` as `python -I -S sandbox.py OPTIONS -- PROGRAM ARGUMENTS`. Imports nothing
beyond the standard library and nothing of this package, so that it starts in a few milliseconds.
Three independent walls, the strongest that the kernel and the agent's own rights allow:

- another user, where the agent is root;
- Landlock, where the kernel has it: no file but the listed ones, no signals to others;
- seccomp, on the processors listed here: no connection and no datagram to anybody. `bind` and
  `listen` succeed without doing anything, so that a test neither needs nor takes a port.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import socket
import struct
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_SINCE_5 = (1 << 16) - 1
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_CONNECT_TCP = 1 << 1
_SCOPES = 0b11  # abstract Unix sockets, signals

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM = 1
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32_BIT = 0x40000000

# Numbers of system calls: connect, sendto, sendmsg, sendmmsg, ptrace, mount, add_key, request_key,
# keyctl, unshare, setns, process_vm_readv, process_vm_writev, bpf, io_uring_setup, pidfd_getfd.
_REFUSED = {
    "x86_64": (42, 44, 46, 307, 101, 165, 248, 249, 250, 272, 308, 310, 311, 321, 425, 438),
    "aarch64": (203, 206, 211, 269, 117, 40, 217, 218, 219, 97, 268, 270, 271, 280, 425, 438),
}
_IGNORED = {"x86_64": (49, 50), "aarch64": (200, 201)}  # bind, listen
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CPU_SECONDS = 10
FILE_BYTES = 16 * 1024 * 1024
MEMORY_BYTES = 2 * 1024 * 1024 * 1024
"""NGINX's shared zones are part of it; a text that asks for more is told so by NGINX."""


def limit_resources() -> None:
    for what, limit in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (lower, lower))


def become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """0 where the kernel has none."""
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _RULESET_VERSION_FLAG)))


def restrict_files(readable: list[str], writable: list[str]) -> bool:
    """Only these files and what lies below them; False where the kernel cannot do it."""
    version, libc = landlock_version(), _libc()
    if version < 1:
        return False
    everything = _ALL_BY_ABI.get(version, _ALL_SINCE_5)
    fields = [everything]
    if version >= 4:
        fields.append(_CONNECT_TCP)
    if version >= 6:
        fields.append(_SCOPES)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    wanted = [(path, _EXECUTE | _READ_FILE | _READ_DIR) for path in readable]
    wanted += [(path, everything & ~_EXECUTE) for path in writable]
    for path, access in wanted:
        try:
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not there, or not for this user
            continue
        possible = everything if os.path.isdir(path) else everything & _OF_FILES  # noqa: PTH112
        rule = struct.pack("=Qi", access & possible, beneath)
        failed = libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
        os.close(beneath)
        if failed:
            return False
    restricted = int(libc.syscall(_RESTRICT_SELF, rules, 0)) == 0
    os.close(rules)
    return restricted


def restrict_calls() -> bool:
    """No way to anybody else; False on processors whose system calls are not listed."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    program = [
        struct.pack("=HBBI", _LOAD, 0, 0, 4),
        struct.pack("=HBBI", _IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        struct.pack("=HBBI", _RETURN, 0, 0, _KILL),
        struct.pack("=HBBI", _LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        program.append(struct.pack("=HBBI", _IF_AT_LEAST, 0, 1, _X32_BIT))
        program.append(struct.pack("=HBBI", _RETURN, 0, 0, _ERRNO | _EPERM))
    for numbers, answer in ((_REFUSED[machine], _ERRNO | _EPERM), (_IGNORED[machine], _ERRNO)):
        for number in numbers:
            program.append(struct.pack("=HBBI", _IF_EQUAL, 0, 1, number))
            program.append(struct.pack("=HBBI", _RETURN, 0, 0, answer))
    program.append(struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    return int(_libc().prctl(_SET_SECCOMP, _MODE_FILTER, filters, 0, 0)) == 0


def confine(options: argparse.Namespace) -> set[str]:
    """Put up every wall that there is; the names of those that stand."""
    walls = set()
    limit_resources()
    if options.uid is not None:
        become(options.uid, options.gid)
        walls.add("user")
    _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if "landlock" not in options.without and restrict_files(options.read, options.write):
        walls.add("landlock")
    if "seccomp" not in options.without and restrict_calls():
        walls.add("seccomp")
    return walls


def standing(walls: set[str]) -> set[str]:
    """The walls that hold when they are run into; what was put up and does not hold is left out."""
    held = set(walls)
    try:
        os.close(os.open("/etc/passwd", os.O_RDONLY))
        held.discard("landlock")
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        try:
            datagram.sendto(b"", ("127.0.0.1", 9))
            held.discard("seccomp")
        except PermissionError:
            pass
    return held


def enough(walls: set[str]) -> bool:
    """Whether these keep a program from files and from the network."""
    return "seccomp" in walls and bool({"user", "landlock"} & walls)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uid", type=int)
    parser.add_argument("--gid", type=int)
    parser.add_argument("--read", action="append", default=[])
    parser.add_argument("--write", action="append", default=[])
    parser.add_argument(
        "--without", action="append", default=[], help="leave a wall out, to see what is missing"
    )
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("program", nargs="*")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    walls = confine(options)
    if options.probe:
        sys.stdout.write("\n".join(sorted(standing(walls))) + "\n")
    elif not enough(walls):
        sys.exit("the sandbox does not hold; nothing was run")
    else:
        os.execv(options.program[0], options.program)  # noqa: S606  # that is what it is for


if __name__ == "__main__":
    main(sys.argv[1:])

"""Contexts: which servers this person knows, and which one is meant when nobody says.

A context is a server's address, a token, and the authority that vouches for the server. They stand in one
file that is its owner's alone. The current context changes by `use` and in no other way: not by logging in,
not by deleting another, and not because a server is away.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleetplane import environment
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

LOCAL = "local"
"""The server on this machine, at its owner's socket. Always there, and never stored."""
FILE_LIMIT_BYTES = 1024 * 1024
"""Some hundred contexts with a chain of certificates each."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One server, and who this person is there."""

    name: str
    server: str = ""
    """URL of its web listener; empty for `local`."""
    token: str = field(default="", repr=False)
    ca_pem: str = field(default="", repr=False)
    """The only authority that vouches for the server; the system's authorities when empty."""
    scope: str = ""
    """Where commands look when they name no scope."""
    refresh_token: str = field(default="", repr=False)
    """Of a person's login: good once, for the next pair of tokens. Empty for a token of a program."""
    expires_at: int = 0
    """When the access token of a login ends, in seconds since 1970."""

    @property
    def is_local(self) -> bool:
        """Whether this is the server on this machine."""
        return self.name == LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """What the file says."""

    contexts: Mapping[str, Context] = field(default_factory=dict)
    current: str = LOCAL

    def get(self, name: str) -> Context:
        """The context of that name; raises `NotFound` with the names that there are."""
        if name == LOCAL:
            return Context(name=LOCAL)
        if name not in self.contexts:
            known = ", ".join(sorted({*self.contexts, LOCAL}))
            raise NotFound(
                f"there is no context {name!r}",
                hint=f"known: {known}; `fleetplane login URL --name {name}` makes it",
            )
        return self.contexts[name]

    def with_context(self, context: Context) -> Contexts:
        """The contexts with this one added or replaced; the current one stays."""
        check_name(context.name)
        return replace(self, contexts={**self.contexts, context.name: context})

    def without(self, name: str) -> Contexts:
        """The contexts without this one; refuses the current one, since another would be meant then."""
        self.get(name)
        if name == LOCAL:
            raise FailedPrecondition(f"{LOCAL} is the server on this machine and cannot be deleted")
        if name == self.current:
            raise FailedPrecondition(
                f"{name} is the current context", hint=f"`fleetplane context use {LOCAL}` first"
            )
        return replace(self, contexts={one: held for one, held in self.contexts.items() if one != name})

    def using(self, name: str) -> Contexts:
        """The contexts with this one current."""
        return replace(self, current=self.get(name).name)


def check_name(name: str) -> None:
    """Refuse names that a context cannot have."""
    if name == LOCAL:
        raise InvalidArgument(f"{LOCAL} is the server on this machine; give another name", field="name")
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is no name of a context", field="name", hint="letters, digits and . _ : - are allowed"
        )


class ContextFile:
    """The file with the contexts of whoever runs this process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<ContextFile {self.path}>"

    @classmethod
    def default(cls, variables: Mapping[str, str] | None = None) -> ContextFile:
        """`$FLEETPLANE_CONTEXTS`, else `fleetplane/contexts.json` in the configuration folder."""
        known = environment.current() if variables is None else variables
        if given := known.get("FLEETPLANE_CONTEXTS"):
            return cls(Path(given))
        base = known.get("XDG_CONFIG_HOME") or os.path.join(known.get("HOME") or "/", ".config")  # noqa: PTH118
        return cls(Path(base) / "fleetplane" / "contexts.json")

    def read(self) -> Contexts:
        """What the file says; nothing when there is none. Refuses a file that others can read or write."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return Contexts()
        with os.fdopen(descriptor, "rb") as file:
            self._check(os.fstat(file.fileno()))
            content = file.read(FILE_LIMIT_BYTES + 1)
        if len(content) > FILE_LIMIT_BYTES:
            raise InvalidArgument(f"{self.path} is longer than {FILE_LIMIT_BYTES} bytes")
        return self._parsed(content)

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise FailedPrecondition(f"{self.path} is no ordinary file")
        if found.st_uid != os.geteuid():
            raise FailedPrecondition(
                f"{self.path} belongs to another user, who could send your commands elsewhere",
                hint="FLEETPLANE_CONTEXTS names a file of your own",
            )
        if found.st_mode & OTHERS:
            raise FailedPrecondition(
                f"{self.path} holds tokens and others may open it (mode {stat.S_IMODE(found.st_mode):04o})",
                hint=f"chmod 600 {self.path}",
            )

    def _parsed(self, content: bytes) -> Contexts:
        try:
            told = json.loads(content)
            contexts = {name: _context(name, held) for name, held in told["contexts"].items()}
            current = _text(told, "current") or LOCAL
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                f"{self.path} cannot be read: {error!r}", hint="remove it and log in again"
            ) from error
        return Contexts(contexts=contexts, current=current)

    def write(self, contexts: Contexts) -> None:
        """Replace the file as a whole; it is its owner's alone."""
        from fleetplane.kernel.files import write_durably

        told = {
            "version": 1,
            "current": contexts.current,
            "contexts": {name: _told(one) for name, one in sorted(contexts.contexts.items())},
        }
        write_durably(self.path, json.dumps(told, indent=2).encode() + b"\n", mode=0o600)

    @contextlib.contextmanager
    def changing(self) -> Iterator[Contexts]:
        """Read the file while no other command changes it; end the block with `write`."""
        import fcntl

        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = self.path.with_name(f".{self.path.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(descriptor)


def _context(name: str, told: Mapping[str, Any]) -> Context:
    return Context(
        name=name,
        server=_text(told, "server"),
        token=_text(told, "token"),
        ca_pem=_text(told, "caPem"),
        scope=_text(told, "scope"),
        refresh_token=_text(told, "refreshToken"),
        expires_at=int(_text(told, "expiresAt") or 0),
    )


def _text(told: Mapping[str, Any], key: str) -> str:
    value = told.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value


def _told(context: Context) -> dict[str, str]:
    told = {
        "server": context.server,
        "token": context.token,
        "caPem": context.ca_pem,
        "scope": context.scope,
        "refreshToken": context.refresh_token,
        "expiresAt": str(context.expires_at) if context.refresh_token else "",
    }
    return {key: value for key, value in told.items() if value}

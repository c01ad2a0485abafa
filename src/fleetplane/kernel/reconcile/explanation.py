""" "Why is this not happening?", answered by the controller that is not doing it.

Every pass over a key leaves behind what it found, in memory and bounded: after a restart the
first pass says it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fleetplane.kernel.errors import AlreadyExists, NotFound


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of a pass."""

    code: str
    """Stable, for programs, such as `FROZEN` or `RATE_LIMITED`."""
    message: str
    """For people: what is waited for, with names and numbers."""
    subject: str = ""
    """What it is about, if not the key itself: an instance of the group, for example."""


class PassResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass over a key came to."""

    explanation: tuple[Reason, ...] = ()
    """Why something that was wanted was not done; empty if everything is as it should be."""
    requeue_after_seconds: float | None = None
    """When to look again without being asked; None to wait until something changes."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a key: its last pass, and when the next one comes."""

    key: str
    at_ns: int
    """When the last pass ended."""
    reasons: tuple[Reason, ...]
    """Of the last pass that did not fail."""
    next_due_ns: int | None = None
    """When it is looked at next; None if only when something changes."""
    failures: int = 0
    """Passes that failed in a row."""
    last_error: str = ""
    """Of the last of these."""


class Explaining(Protocol):
    """A controller, as those see it who ask."""

    @property
    def name(self) -> str: ...

    def explain(self, key: str) -> Explanation | None: ...

    def explanations(self) -> Iterator[Explanation]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one controller says about one key."""

    controller: str
    explanation: Explanation


class Explanations:
    """All controllers, searched by key for an explanation."""

    def __init__(self) -> None:
        self._controllers: dict[str, Explaining] = {}

    def __repr__(self) -> str:
        return f"<Explanations {' '.join(sorted(self._controllers))}>"

    def register(self, controller: Explaining) -> None:
        if self._controllers.setdefault(controller.name, controller) is not controller:
            raise AlreadyExists(f"there is a controller named {controller.name} already")

    def unregister(self, controller: Explaining) -> None:
        """Remove a controller that has ended; another of its name may register."""
        if self._controllers.get(controller.name) is controller:
            del self._controllers[controller.name]

    @property
    def controllers(self) -> tuple[str, ...]:
        return tuple(sorted(self._controllers))

    def about(self, key: str) -> list[Finding]:
        """What every controller knows about a key."""
        found = ((name, self._controllers[name].explain(key)) for name in self.controllers)
        return [
            Finding(controller=name, explanation=explanation) for name, explanation in found if explanation
        ]

    def of(self, controller: str) -> list[Finding]:
        """What one controller knows about all its keys."""
        if controller not in self._controllers:
            known = ", ".join(self.controllers) or "none"
            raise NotFound(f"there is no controller named {controller}", hint=f"there are: {known}")
        return [
            Finding(controller=controller, explanation=explanation)
            for explanation in self._controllers[controller].explanations()
        ]

    def all(self) -> list[Finding]:
        return [finding for name in self.controllers for finding in self.of(name)]

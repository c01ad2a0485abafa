"""Objects of the resource API, as the client gives them to programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetplane.kernel.errors import IntegrityError


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What an object is called, where it lies, and which version of it this is."""

    name: str
    scope: str = "/"
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    revision: int = 0
    generation: int = 0
    created_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One finding about an object, such as `Ready` being `False`."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    changed_at: str | None = None
    observed_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One thing that the server looks after: what it should be (`spec`) and how it is (`status`)."""

    kind: str
    metadata: Metadata
    spec: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    conditions: Sequence[Condition] = ()
    etag: str = ""
    """Of the version that was read, for `If-Match`; empty in lists and watches."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The object as the server wrote it."""

    @property
    def name(self) -> str:
        """What it is called in its scope."""
        return self.metadata.name

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, scope and name: which object it is, whatever its version."""
        return self.kind, self.metadata.scope, self.metadata.name

    def condition(self, type_: str) -> Condition | None:
        """The condition of that type, if it is known."""
        return next((one for one in self.conditions if one.type == type_), None)

    def at(self, path: str) -> Any:
        """What lies at a path such as `.status.state`; None where nothing does."""
        found: Any = self.raw
        for key in path.strip(".").split("."):
            if not isinstance(found, Mapping):
                return None
            found = found.get(key)
        return found

    @classmethod
    def of(cls, told: Any, *, etag: str = "") -> Object:
        """An object from what the server wrote; raises `IntegrityError` if that is none."""
        try:
            metadata = told["metadata"]
            return cls(
                kind=str(told["kind"]),
                metadata=Metadata(
                    name=str(metadata["name"]),
                    scope=str(metadata.get("scope") or "/"),
                    uid=str(metadata.get("uid") or ""),
                    labels=dict(metadata.get("labels") or {}),
                    revision=int(metadata.get("revision") or 0),
                    generation=int(metadata.get("generation") or 0),
                    created_at=str(metadata.get("createdAt") or ""),
                ),
                spec=dict(told.get("spec") or {}),
                status=dict(told.get("status") or {}),
                conditions=tuple(_condition(one) for one in told.get("conditions") or ()),
                etag=etag,
                raw=told,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"the server's answer is no object: {error!r}") from error


def _condition(told: Mapping[str, Any]) -> Condition:
    changed = told.get("changedAt")
    return Condition(
        type=str(told["type"]),
        status=str(told["status"]),
        reason=str(told.get("reason") or ""),
        message=str(told.get("message") or ""),
        changed_at=None if changed is None else str(changed),
        observed_by=str(told.get("observedBy") or ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All objects of a list, and the revision after which a watch misses nothing."""

    items: Sequence[Object]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that a watch told."""

    type: str
    """`added`, `modified` or `deleted`."""
    object: Object
    revision: int = 0
    """0 within the snapshot that a watch begins with."""


STATUSES = ("True", "False", "Unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What `wait_for` waits for: a condition, a field, or that the object is gone.

    `Ready` and `Ready=True` are conditions, `.status.state=connected` is a field, `deleted` is the end.
    """

    path: str
    value: str = "True"

    @classmethod
    def parsed(cls, text: str) -> Expectation:
        """From its spelling; raises `ValueError` for none."""
        path, equals, value = text.partition("=")
        if not path or (equals and not value) or (path.startswith(".") and not equals):
            raise ValueError(f"{text!r} is neither CONDITION[=True|False|Unknown], .PATH=VALUE nor deleted")
        if not path.startswith(".") and equals and value.capitalize() not in STATUSES:
            raise ValueError(f"{text!r}: a condition is True, False or Unknown")
        return cls(path=path, value=value if path.startswith(".") else (value.capitalize() or "True"))

    @property
    def is_deletion(self) -> bool:
        """Whether the object is expected to be gone."""
        return self.path == "deleted"

    def holds(self, found: Object | None) -> bool:
        """Whether it holds of an object as it is now; None is one that is gone."""
        if self.is_deletion or found is None:
            return self.is_deletion and found is None
        return self.actual(found) == self.value

    def actual(self, found: Object) -> str:
        """What is the case, as it would have been expected."""
        if not self.path.startswith("."):
            condition = found.condition(self.path)
            return "" if condition is None else condition.status
        value = found.at(self.path)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # nobody types 1.0
        return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    def told(self, found: Object | None) -> str:
        """What is the case instead, for people."""
        if found is None:
            return "it is gone"
        if self.is_deletion:
            return "it is still there"
        condition = found.condition(self.path)
        reason = f" ({condition.reason})" if condition is not None and condition.reason else ""
        return f"{self.path} is {self.actual(found) or 'not known'}{reason}"

    def __str__(self) -> str:
        return self.path if self.is_deletion else f"{self.path}={self.value}"

"""Who depends on which authority, and whether it is time for the next step of its succession. Pure.

What an instance was sent proves nothing: agents of the first implementation read only the first
certificate of what they are given. An instance is taken to trust an authority when its agent has reported
to hold it, or when it was made at a time at which that authority signed and came first, because then it
has registered over a connection that this authority's certificate secured. What operators know is theirs to
say: only what they were issued is known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetplane.domains.instances.kinds import Instance, OperatorRecord
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.roots import SuccessionPhase

NAMED_LIMIT = 5
"""Instances that are named in a refusal; the others are counted."""
_GONE = (rules.State.DELETING, rules.State.DELETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    instances: Counter[str]
    """Live instances, by the authority that signed their certificate."""
    operators: Counter[str]
    """Operators' certificates that have not run out, likewise."""
    unaware: Sequence[str]
    """Live instances that have not shown that they trust everyone who is trusted now."""


def census(
    authority: Authority, instances: Iterable[Instance], operators: Iterable[OperatorRecord], *, now_ns: int
) -> Census:
    # Records that name no authority are from before there could be two: it was the eldest.
    eldest = authority.members[-1 if authority.phase is SuccessionPhase.SWITCHED else 0].key_id
    # Before a switch the announced one signs nothing that anyone could have verified.
    shown_since_ns = authority.signing_since_ns if authority.phase is SuccessionPhase.SWITCHED else None
    by_instance: Counter[str] = Counter()
    unaware = []
    for instance in instances:
        status = instance.status
        if status is None or status.registered_at_ns is None or rules.state(instance) in _GONE:
            continue
        by_instance[status.certificate_authority or eldest] += 1
        shown = shown_since_ns is not None and instance.created_at_ns >= shown_since_ns
        if authority.phase is not SuccessionPhase.STEADY and not shown and status.trust != authority.trust_id:
            unaware.append(instance.name)
    return Census(
        instances=by_instance,
        operators=Counter(
            record.authority or eldest for record in operators if record.expires_at_ns > now_ns
        ),
        unaware=unaware,
    )


def check_switch(authority: Authority, found: Census) -> None:
    """Refuse to sign with an authority whose signature some instances would not believe.

    They believe it if the one before vouches for it, which those made by earlier versions cannot.
    """
    if found.unaware and not authority.vouches:
        raise FailedPrecondition(
            f"{_many(len(found.unaware), 'instance')} would not find the server again: "
            f"not shown to trust the announced authority: {_named(found.unaware)}",
            hint="agents take it up within two hours; those that cannot must be replaced; or force it",
            details={"unaware": str(len(found.unaware))},
        )


def check_retire(authority: Authority, found: Census) -> None:
    """Refuse to retire an authority while someone comes in by its certificates."""
    if authority.phase is SuccessionPhase.SWITCHED and found.unaware:
        raise FailedPrecondition(
            f"{_many(len(found.unaware), 'instance')} would not find the server again: "
            f"not shown to trust the authority that signs now: {_named(found.unaware)}",
            hint="agents take it up within two hours; those that cannot must be replaced; or force it",
            details={"unaware": str(len(found.unaware))},
        )
    retiring = authority.members[-1].key_id
    instances, operators = found.instances[retiring], found.operators[retiring]
    if authority.phase is SuccessionPhase.SWITCHED and (instances or operators):
        raise FailedPrecondition(
            f"{_many(instances, 'instance')} and {_many(operators, 'operator')} "
            "still have certificates of the authority before",
            hint="wait until they have renewed, or were replaced; or force it",
            details={"instances": str(instances), "operators": str(operators)},
        )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED_LIMIT])
    return shown if len(names) <= NAMED_LIMIT else f"{shown} and {len(names) - NAMED_LIMIT} more"

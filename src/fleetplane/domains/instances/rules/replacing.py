"""Which instances of a group take the places of which, while versions are held or rolled out. Pure.

Every instance has a place: its own name, or the name of the first in the line of those that it follows. A
place whose instance is not of the wanted version gets a second one beside it; the first drains once the
second reports and is well. So there are never fewer instances at work than are wanted, and never more than
the places under way above that. Where a rollout lets some be unavailable, so many of the first drain as soon
as the second is recorded. An instance that waits beside another is no surplus, and does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.rules.plans import Create, GroupMember, GroupPolicy, Rolling, State, state
from fleetplane.kernel.values.times import NS

_STANDING = (State.PENDING, State.PROVISIONED, State.REGISTERED)


def place_of(instance: Instance) -> str:
    """The place that an instance has in its group."""
    return instance.spec.place or instance.name


def lines(members: Iterable[GroupMember]) -> Mapping[str, Sequence[GroupMember]]:
    """Those who stand in each place, neither drained nor gone nor on demand, in order of age."""
    found: dict[str, list[GroupMember]] = {}
    for member in sorted(members, key=lambda one: (one.instance.created_at_ns, one.instance.name)):
        if not member.instance.spec.on_demand and state(member.instance) in _STANDING:
            found.setdefault(place_of(member.instance), []).append(member)
    return found


def beside(members: Iterable[GroupMember]) -> frozenset[str]:
    """Instances that wait beside the one whose place they are to take."""
    return frozenset(one.instance.name for line in lines(members).values() for one in line[1:])


def is_heard(member: GroupMember, policy: GroupPolicy, now_ns: int) -> bool:
    """Whether nothing speaks against an instance: registered, and not silent for too long.

    Who has not reported to a server that was started has the time from then on.
    """
    status = member.instance.status
    if status is None or state(member.instance) is not State.REGISTERED or member.lost:
        return False
    if status.unhealthy_since_ns is not None or member.heard_at_ns is None:
        return False
    return now_ns - member.heard_at_ns < round(policy.unhealthy_after_seconds * NS)


def is_well(member: GroupMember, policy: GroupPolicy, now_ns: int) -> bool:
    """Whether an instance is known to be at work: it has reported to this server, and in time."""
    return member.reported and is_heard(member, policy, now_ns)


def relieved(
    rolling: Rolling, members: Iterable[GroupMember], policy: GroupPolicy, now_ns: int
) -> Iterator[tuple[GroupMember, bool]]:
    """Those who are to drain now, each with whether another must be there before it goes."""
    found = lines(members)
    room = rolling.unavailable - sum(
        not any(is_well(one, policy, now_ns) for one in line) for line in found.values()
    )
    for place, line in found.items():
        wanted = rolling.wanted(place)
        first, later = line[0], line[1:]
        if _is_of(first, wanted):
            yield from ((one, False) for one in later)
            continue
        if any(_is_of(one, wanted) and is_well(one, policy, now_ns) for one in later):
            yield first, True
        elif room > 0 and any(_is_of(one, wanted) for one in later) and is_well(first, policy, now_ns):
            room -= 1
            yield first, False
        yield from ((one, False) for one in later if not _is_of(one, wanted))


def replacements(rolling: Rolling, members: Iterable[GroupMember]) -> Iterator[Create]:
    """Instances to make beside others."""
    under_way = 0
    missing: list[Create] = []
    for place, line in lines(members).items():
        wanted = rolling.wanted(place)
        if _is_of(line[0], wanted):
            continue
        if any(_is_of(one, wanted) for one in line[1:]):
            under_way += 1
        else:
            missing.append(Create(place=place, replaces=line[0].instance.name))
    yield from missing if rolling.paced else missing[: max(0, 1 - under_way)]


def replaced(members: Iterable[GroupMember]) -> frozenset[str]:
    """Instances that drain and whose place another has already."""
    members = tuple(members)
    taken = lines(members).keys()
    return frozenset(
        one.instance.name
        for one in members
        if state(one.instance) is State.DRAINING and place_of(one.instance) in taken
    )


def _is_of(member: GroupMember, wanted: str) -> bool:
    return member.instance.spec.infra_hash == wanted

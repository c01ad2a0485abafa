"""What the server keeps of the troubles of groups and instances, as the resource API tells logs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from fleetplane.domains.instances.kinds import tenant_of
from fleetplane.domains.instances.live.errors import REMEMBERED_LIMIT, Trouble
from fleetplane.fleet.resources.declaration import LogCall, LogLine
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import spelled

LEVEL = "error"


async def instance_logs(call: LogCall) -> AsyncGenerator[LogLine, None]:
    """Errors about an instance, and those about its whole group."""
    name, group = call.stored.name, call.stored.spec.group

    def about(one: Trouble) -> bool:
        return one.group == group and one.instance in (name, "")

    async for line in _told(call, about):
        yield line


async def group_logs(call: LogCall) -> AsyncGenerator[LogLine, None]:
    """Errors about a group and its instances."""
    name = call.stored.name
    async for line in _told(call, lambda one: one.group == name):
        yield line


async def _told(call: LogCall, about: Callable[[Trouble], bool]) -> AsyncGenerator[LogLine, None]:
    query, errors, tenant = call.query, call.domain.errors, tenant_of(call.stored)
    if query.level not in ("", LEVEL) or query.source:
        field = "source" if query.source else "level"
        raise InvalidArgument("is not possible here: the server keeps errors alone", field=field)

    def fits(one: Trouble) -> bool:
        return about(one) and query.contains.lower() in one.text.lower()

    with errors.subscribe(tenant) as listening:
        there = [one for one in errors.recent(tenant, REMEMBERED_LIMIT) if fits(one)][: query.tail]
        for one in reversed(there):
            yield _line(one)
        if query.follow:
            async for one in listening:
                if fits(one):
                    yield _line(one, dropped=listening.take_lost())


def _line(trouble: Trouble, *, dropped: int = 0) -> LogLine:
    source = trouble.instance or trouble.group
    return LogLine(
        at=spelled(trouble.at_ns), level=LEVEL, source=source, message=trouble.text, dropped=dropped
    )

"""Groups as objects that people write through the resource API.

The configuration says which groups there are; what is written here is what operators set at run time beside
it, with the same checks. A group that is configured can be made larger, of another type and with further
variables; one that is not is made from a template. Deleting takes back what was set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from fleetplane.domains.instances import access
from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.configuration.merge import EffectiveGroup, effective
from fleetplane.domains.instances.grpc.operator_groups import OperatorGroups
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, GroupOverride, tenant_scope
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.resources import SIZE_LIMIT, GroupSpecView, group_object
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.declaration import Secret, ViewReader, Writable, WriteCall
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft, Store

_CONFIG = "config."


class InstanceParts(Protocol):
    """What of the running domain writes."""

    @property
    def store(self) -> Store: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def operator_groups(self) -> OperatorGroups: ...


def tenant_in(scope: str) -> str:
    """The tenant that a scope of the API is; raises for one that is none."""
    parts = scope.split("/")
    if len(parts) != 3 or parts[1] != scopes.TENANTS:
        raise InvalidArgument(f"{scope} is no tenant", field="scope", hint="write /tenants/NAME")
    return parts[2]


def find_group(domain: InstanceParts, draft: Draft, scope: str, name: str) -> AnyResource | None:
    """As the configuration and a draft say together; one that operators must not know of is not there."""
    tenant, configuration = tenant_in(scope), domain.groups.configuration_in(draft)
    if configuration is None:
        return None
    written = draft.get(GROUP, tenant_scope(tenant), name)
    group = effective(configuration, tenant, name, None if written is None else written.spec)
    if group is None or group.is_nat:
        return None
    # From the store and not from the draft: how many there are decides nothing about what is written.
    here = domain.store.list(INSTANCE, tenant_scope(tenant))
    return group_object(domain.store, group, (one for one in here if one.spec.group == name), written)


def put_group(call: WriteCall) -> AnyResource:
    """Make a group, or set what may be set of one."""
    domain: InstanceParts = call.domain
    tenant, configuration = tenant_in(call.scope), domain.groups.required_in(call.draft)
    found = call.draft.get(GROUP, tenant_scope(tenant), call.name)
    before = GroupOverride() if found is None else found.spec
    wanted = override_of(configuration, tenant, call.name, call.spec, before)
    with _fields_of_the_spec():
        domain.operator_groups.put(call.draft, tenant, call.name, wanted, merged=lambda _before: wanted)
    made = find_group(domain, call.draft, call.scope, call.name)
    assert made is not None, "it was put"
    return made


def override_of(
    configuration: InstancesDocument, tenant: str, key: str, given: GroupSpecView, before: GroupOverride
) -> GroupOverride:
    """What is set at run time where a group shall be as given. What it inherits is not set. Pure."""
    if not 0 <= given.size <= SIZE_LIMIT:
        raise InvalidArgument(f"must be from 0 to {SIZE_LIMIT}, not {given.size}", field="size")
    configured = key in configuration.groups.get(tenant, {})
    template = "" if configured else given.template or before.template
    bare = GroupOverride(template=template, size=given.size, args=before.args)
    inherited = _inherited(configuration, tenant, key, bare)
    if configured and inherited is not None and given.template not in ("", inherited.template):
        template = given.template  # which is refused, as the configuration has another
    _check_balancers(given, inherited)
    return msgspec.structs.replace(
        bare,
        template=template,
        instance_type=_unless(given.instance_type, inherited.instance_type if inherited else ""),
        subnet_pool=_unless(given.subnet_pool, inherited.subnet_pool if inherited else ""),
        vars=_variables(given.vars, before.vars, {} if inherited is None else inherited.vars),
    )


def _inherited(
    configuration: InstancesDocument, tenant: str, key: str, bare: GroupOverride
) -> EffectiveGroup | None:
    """The group with nothing set of it but its size; None if there is no such template."""
    try:
        return effective(configuration, tenant, key, bare)
    except FailedPrecondition:
        return None


def _unless(given: str, inherited: str) -> str:
    return "" if given == inherited else given


def _check_balancers(given: GroupSpecView, inherited: EffectiveGroup | None) -> None:
    there = () if inherited is None else inherited.load_balancers
    if given.load_balancers and given.load_balancers != there:
        raise FailedPrecondition(
            "the load balancers of a group are set in the configuration",
            field="loadBalancers",
            hint="leave them out, or change the configuration",
        )


def _variables(
    given: Mapping[str, str | Secret], known: Mapping[str, str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """What is not given anew stays as it is."""
    merged = dict(known)
    for name, value in given.items():
        if isinstance(value, str):
            merged[name] = value
        elif not value.set and merged.pop(name, None) is None and name in inherited:
            raise FailedPrecondition(
                f"variable {name[:64]!r} is configured",
                field=f"vars.{name[:64]}",
                hint="take it away in the configuration",
            )
    return merged


@contextmanager
def _fields_of_the_spec() -> Iterator[None]:
    """Errors with the fields of the object; the operators' own protocol has them in `config`."""
    try:
        yield
    except FleetplaneError as error:
        if error.field is not None and error.field.startswith(_CONFIG):
            error.field = error.field.removeprefix(_CONFIG)
        raise


def delete_group(call: WriteCall) -> None:
    """Take back what was set; a group that is configured stays, as configured."""
    domain: InstanceParts = call.domain
    tenant = tenant_in(call.scope)
    if call.draft.get(GROUP, tenant_scope(tenant), call.name) is None:
        raise FailedPrecondition(
            f"group {call.name!r} is configured, and nothing of it was set at run time",
            hint="take it away in the configuration",
        )
    domain.operator_groups.take_back(call.draft, tenant, call.name)


def disturbs(before: AnyResource | None, after: AnyResource | None, _reading: ViewReader) -> Sequence[str]:
    """How many machines come and go, and what is replaced."""
    was, will = (0 if one is None else one.spec.size for one in (before, after))
    told = []
    if will > was:
        told.append(f"{will - was} instances are made")
    if will < was:
        told.append(f"{was - will} instances are drained and deleted")
    if before is not None and after is not None and min(was, will):
        fields = ("template", "instance_type", "subnet_pool")
        if any(getattr(before.spec, one) != getattr(after.spec, one) for one in fields):
            told.append(f"{min(was, will)} instances differ from their group and are replaced")
    return told


WRITERS: Mapping[str, Writable] = {
    "group": Writable(
        permission=access.AS_OPERATOR,
        find=find_group,
        put=put_group,
        delete=delete_group,
        kind=GROUP,
        rank=40,
        anywhere=True,
        exported=lambda stored: stored.revision > 0,
        disturbs=disturbs,
    )
}

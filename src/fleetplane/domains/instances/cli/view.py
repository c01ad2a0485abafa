"""Groups, instances and findings as people and programs read them. Pure; `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.cli.output import Cell, PrintedTable
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.nstance.v1 import operator_pb2

STATE_STYLES = {
    "pending": "yellow",
    "provisioned": "yellow",
    "registered": "green",
    "draining": "bold yellow",
    "deleting": "red",
    "deleted": "dim",
}
NOTHING = PrintedTable(columns=(), rows=(), empty="")
"""For answers that have no table."""
ROLE_STYLES = {"signing": "green", "announced": "yellow", "retiring": "bold yellow"}
NO_GROUPS = "No groups are configured for this tenant."


def plain(message: Message) -> dict[str, Any]:
    """A message for programs: its own field names, and every field that is not a moment."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def since(moment: Timestamp, now: float) -> str:
    """How long ago, in one unit; a dash for never."""
    if not moment.seconds:
        return "-"
    return _span(max(0.0, now - moment.ToNanoseconds() / 1e9))


def ahead(moment: Timestamp, now: float) -> str:
    if not moment.seconds:
        return "-"
    return _span(max(0.0, moment.ToNanoseconds() / 1e9 - now))


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    return f"{whole // 3600}h" if whole < 48 * 3600 else f"{whole // 86400}d"


def group_table(groups: Iterable[operator_pb2.GroupStatus]) -> PrintedTable:
    return PrintedTable(
        columns=("GROUP", "SIZE", "ACTUAL", "TEMPLATE", "TYPE", "POOL", "CONFIGURED", "VARS"),
        rows=[
            (
                Cell(text=group.key),
                Cell(text=str(group.size)),
                Cell(
                    text=str(group.actual_size),
                    style="green" if group.actual_size == group.size else "yellow",
                ),
                Cell(text=group.template),
                Cell(text=group.instance_type or "-"),
                Cell(text=group.subnet_pool or "-"),
                Cell(text="yes" if group.is_static else "no"),
                Cell(text=" ".join(f"{name}={group.vars[name]}" for name in sorted(group.vars)) or "-"),
            )
            for group in groups
        ],
        empty=NO_GROUPS,
    )


def instance_table(instances: Iterable[admin_pb2.InstanceEntry], now: float) -> PrintedTable:
    return PrintedTable(
        columns=("INSTANCE", "TENANT", "GROUP", "STATE", "AGE", "SEEN", "PROVIDER ID", "REASON"),
        rows=[
            (
                Cell(text=entry.instance_id),
                Cell(text=entry.tenant),
                Cell(text=entry.group + (" (on demand)" if entry.on_demand else "")),
                Cell(text=entry.state, style=STATE_STYLES.get(entry.state, "")),
                Cell(text=since(entry.created_at, now)),
                Cell(text=since(entry.last_seen, now)),
                Cell(text=entry.provider_id or "-"),
                Cell(text=entry.reason or entry.last_error or "-"),
            )
            for entry in instances
        ],
        empty="No instances.",
    )


def freeze_table(freezes: Iterable[admin_pb2.FreezeEntry], now: float) -> PrintedTable:
    return PrintedTable(
        columns=("SCOPE", "SINCE", "ENDS IN", "BY", "REASON"),
        rows=[
            (
                Cell(text=entry.scope or "everywhere"),
                Cell(text=since(entry.frozen_at, now)),
                Cell(text=ahead(entry.expires_at, now)),
                Cell(text=entry.actor),
                Cell(text=entry.reason),
            )
            for entry in freezes
        ],
        empty="Nothing is frozen.",
    )


def finding_table(findings: Iterable[admin_pb2.Finding], now: float) -> PrintedTable:
    rows = []
    for finding in findings:
        told = [(reason.code, _about(reason)) for reason in finding.reasons]
        if finding.last_error:
            told.append(("FAILED", f"{finding.last_error} ({finding.failures} in a row)"))
        for code, message in told or [("-", "everything is as it should be")]:
            rows.append(
                (
                    Cell(text=finding.key),
                    Cell(text=since(finding.at, now)),
                    Cell(text=ahead(finding.next_due, now)),
                    Cell(text=code, style="" if code == "-" else "yellow"),
                    Cell(text=message),
                )
            )
    return PrintedTable(
        columns=("KEY", "LOOKED", "AGAIN IN", "CODE", "WHY"), rows=rows, empty="Nothing is known yet."
    )


def _about(reason: admin_pb2.Reason) -> str:
    return f"{reason.subject}: {reason.message}" if reason.subject else reason.message


def status_table(found: operator_pb2.InstanceStatusResponse, now: float) -> PrintedTable:
    return PrintedTable(
        columns=("INSTANCE", "TENANT", "STATUS", "AGE", "SEEN", "PROVIDER ID"),
        rows=[
            (
                Cell(text=found.instance_id),
                Cell(text=found.tenant),
                Cell(text=found.status),
                Cell(text=since(found.created_at, now)),
                Cell(text=since(found.last_seen, now)),
                Cell(text=found.provider_instance_id or "-"),
            )
        ],
        empty="",
    )


def listener_table(listeners: Iterable[operator_pb2.ListenerActivity], now: float) -> PrintedTable:
    return PrintedTable(
        columns=("LISTENER", "AVAILABLE", "IDLE"),
        rows=[
            (
                Cell(text=entry.listener),
                Cell(text="yes" if entry.available else "no", style="green" if entry.available else "yellow"),
                Cell(text=since(entry.idle_since, now)),
            )
            for entry in listeners
        ],
        empty="No listeners.",
    )


def settings_table(found: admin_pb2.GroupSettings) -> PrintedTable:
    def pairs(entries: Mapping[str, str]) -> str:
        return " ".join(f"{name}={entries[name]}" for name in sorted(entries)) or "-"

    cells = (
        found.key,
        str(found.size),
        found.instance_type or "-",
        pairs(found.vars),
        pairs(found.args),
    )
    return PrintedTable(
        columns=("GROUP", "SIZE", "TYPE", "VARS SET", "ARGS SET"),
        rows=[[Cell(text=text) for text in cells]],
        empty="",
    )


def authority_table(authorities: Iterable[authority_pb2.AuthorityEntry], now: float) -> PrintedTable:
    return PrintedTable(
        columns=("AUTHORITY", "ROLE", "ENDS IN", "INSTANCES", "OPERATORS", "KEY"),
        rows=[
            (
                Cell(text=entry.subject),
                Cell(text=entry.role, style=ROLE_STYLES.get(entry.role, "")),
                Cell(text=ahead(entry.not_after, now)),
                Cell(text=str(entry.instances)),
                Cell(text=str(entry.operators)),
                Cell(text=entry.key_id),
            )
            for entry in authorities
        ],
        empty="",
    )


def event_dict(event: Message) -> dict[str, Any]:
    """An event of any watch, with its sort."""
    match event:
        case operator_pb2.GroupEvent():
            return {"kind": "group", "type": group_word(event), "object": plain(event.group)}
        case operator_pb2.InstanceEvent():
            return {"kind": "instance", "type": event.status, "object": plain(event)}
    return {"kind": "error", "type": "error", "object": plain(event)}


def event_line(event: Message) -> str:
    """An event for a log file: fixed fields first, on one line whatever came over the wire."""
    return "".join(character if character.isprintable() else "�" for character in _event_text(event))


def _event_text(event: Message) -> str:
    match event:
        case operator_pb2.GroupEvent(group=group) if group_word(event) == "DELETE":
            return f"group     DELETE            {group.key}"
        case operator_pb2.GroupEvent(group=group):
            return f"group     UPSERT            {group.key}  size={group.size}  actual={group.actual_size}"
        case operator_pb2.InstanceEvent():
            return (
                f"instance  {event.status:16}  {event.instance_id}  group={event.group}  "
                f"reason={event.reason or '-'}"
            )
        case operator_pb2.ErrorEvent():
            what = " ".join(filter(None, (event.group, event.instance_id)))
            return f"error     {what or '-'}  {event.error}"
    return str(event)


def group_word(event: operator_pb2.GroupEvent) -> str:
    """What became of the group. Its contents tell: the numbers mean different things to two generations."""
    return "UPSERT" if event.group.etag else "DELETE"

"""`fleetplane rollout`: change something on many agents in waves; and policies that are written in files.

Over REST: the owner at the server's own socket, anyone else with a token of the role `fleet.operator`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, flat, format_option
from fleetplane.client.places import Place

ENDED = ("done", "rolled_back", "aborted", "superseded")
STYLES = {
    "done": "green", "confirmed": "green", "halted": "red", "failed": "red", "rolled_back": "yellow",
    "rolling_back": "yellow", "aborted": "yellow", "paused": "yellow",
}  # fmt: skip
LOOK_SECONDS = 1.0
PREFIX = "/v1/fleet"
FILE_LIMIT = 64 * 1024
"""Characters: a hundred gates take a tenth of it."""
VALUES_LIMIT = 10_000


@click.group()
def rollout() -> None:
    """Change something on many agents in waves, halt by itself, and roll back.

    SUBJECT is what is changed, such as proxies.config; `fleetplane rollout subjects` shows which there are.
    SCOPE is where, such as a workspace's id. ID is a rollout's id, or the beginning of it.
    """


def _call(place: Place, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
    """The answer of a route of rollouts; a part of the query that is empty is not sent."""
    given = {name: value for name, value in query.items() if value}
    with connect(place) as client:
        return client.call(method, f"{PREFIX}{path}", body=body, query=given or None)


def _path(rollout_id: str) -> str:
    return f"/rollouts/{quote(rollout_id, safe='')}"


policy_option = click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file in YAML or JSON with waves, budgets and gates; the scope's own policy when not given.",
)


@rollout.command()
@click.argument("subject")
@click.argument("scope")
@click.option("--to", default="", help="The version; the newest when not given.")
@policy_option
@click.option("--reason", default="", help="For whoever wonders.")
@click.option("--supersede", is_flag=True, help="End a rollout of the same subject and scope, and take over.")
@click.option("--dry-run", is_flag=True, help="Show which targets would be in which wave, and leave.")
@rest_options
@format_option
def start(
    subject: str,
    scope: str,
    to: str,
    policy_file: Path | None,
    reason: str,
    supersede: bool,
    dry_run: bool,
    output: Format,
    **where: Any,
) -> None:
    """Start a rollout of SUBJECT at SCOPE; it goes on by itself."""
    request: dict[str, Any] = {"subject": subject, "scope": scope, "reason": reason, "supersede": supersede}
    if to:
        request["to"] = to
    if (policy := policy_of(policy_file)) is not None:
        request["policy"] = policy
    place = Place(**where)
    if dry_run:
        _show_plan(_call(place, "POST", "/rollout-plans", request), output)
        return
    made = _call(place, "POST", "/rollouts", request)
    if output is Format.TABLE:
        click.echo(f"rollout {made['id']} to version {made['to']} started with {made['total']} targets")
    else:
        emit(output, made, PrintedTable(columns=(), rows=(), empty=""))


def _show_plan(found: Mapping[str, Any], output: Format) -> None:
    rows = [
        [
            Cell(text=str(number)),
            Cell(text=one["wave"]),
            Cell(text=str(len(one["targets"]))),
            Cell(text=" ".join(name + ("?" if name in one["offline"] else "") for name in one["targets"])),
        ]
        for number, one in enumerate(found["waves"], 1)
    ]
    emit(
        output,
        found,
        PrintedTable(columns=("WAVE", "TAKES", "TARGETS", "NAMES"), rows=rows, empty="no waves"),
    )
    if output is Format.TABLE:
        click.echo(f"to version {found['to']}; {found['already']} targets have it already", err=True)
        for gate in found.get("gates", ()):
            value = "" if gate.get("value") is None else f" ({gate['value']:.4g} over the last hour)"
            told = "would pass" if gate.get("passed") else f"would not pass: {gate.get('message', '')}"
            click.echo(flat(f"gate {gate['name']} {told}{value}"), err=True)
        for blocker in found["blockers"]:
            click.echo(f"would wait: {blocker}", err=True)


@rollout.command()
@click.argument("rollout_id", metavar="[ID]", default="")
@click.option("--scope", default="", help="Without ID: only those at or below a scope.")
@click.option("--subject", default="", help="Without ID: only those of one subject.")
@click.option("--targets", is_flag=True, help="With ID: every target, not only those that failed.")
@rest_options
@format_option
def status(rollout_id: str, scope: str, subject: str, targets: bool, output: Format, **where: Any) -> None:
    """Show a rollout: where it stands, what it waits for, and what failed; or list them all."""
    place = Place(**where)
    if not rollout_id:
        found = _call(place, "GET", "/rollouts", scope=scope, subject=subject)["rollouts"]
        rows = [[*_cells(one), Cell(text=one["scope"] or "everywhere")] for one in found]
        columns = ("ID", "SUBJECT", "TO", "PHASE", "WAVE", "TARGETS", "STARTED", "SCOPE")
        emit(output, found, PrintedTable(columns=columns, rows=rows, empty="There are no rollouts."))
        return
    one = _call(place, "GET", _path(rollout_id))
    if output is not Format.TABLE:
        emit(output, one, PrintedTable(columns=(), rows=(), empty=""))
        return
    for line in _lines(one):
        click.echo(line)
    shown = [
        [
            Cell(text=target["name"]),
            Cell(text=str(target["wave"] or "-")),
            Cell(text=target["state"], style=STYLES.get(target["state"], "")),
            Cell(text=target["before"] or "-"),
            Cell(text=target["error"] or "-"),
        ]
        for target in one["targets"]
        if targets or target["error"]
    ]
    if shown:
        emit(
            output,
            one,
            PrintedTable(columns=("TARGET", "WAVE", "STATE", "BEFORE", "ERROR"), rows=shown, empty=""),
        )


def _cells(one: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(text=one["id"]),
        Cell(text=one["subject"]),
        Cell(text=one["to"]),
        Cell(text=one["phase"], style=STYLES.get(one["phase"], "")),
        Cell(text=f"{one['wave']}/{len(one['waves'])}"),
        Cell(text=_counts(one) or "0"),
        Cell(text=one["started_at"]),
    ]


def _counts(one: Mapping[str, Any]) -> str:
    return " ".join(f"{state}={number}" for state, number in sorted(one["counts"].items()))


def _lines(one: Mapping[str, Any]) -> Iterator[str]:
    wave = f"wave {one['wave']} of {len(one['waves'])}"
    yield f"rollout {one['id']} of {one['subject']} to version {one['to']}: {one['phase']}, {wave}"
    yield f"targets: {one['total']} ({_counts(one)})"
    for reason in one["halt"]:
        yield flat(f"halted: {reason['code']}: {reason['message']}")
    for reason in one["reasons"]:
        if reason not in one["halt"]:
            yield flat(f"waits: {reason['code']}: {reason['message']}")


@rollout.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--for", "seconds", type=float, help="Leave after so many seconds, with exit code 124.")
@rest_options
def watch(rollout_id: str, seconds: float | None, **where: Any) -> None:
    """Show a rollout while it goes on, until it has ended or waits for a person.

    Ends with 0 if it is done, with 7 if not every target is confirmed, with 3 if it did not get that far.
    """
    from fleetplane.cli.exits import CommandFailed, Exit

    place = Place(**where)
    last: tuple[object, ...] = ()
    until = None if seconds is None else time.monotonic() + seconds
    while True:
        one = _call(place, "GET", _path(rollout_id))
        told = tuple(_lines(one))
        if told != last:
            click.echo("\n".join(line for line in told if line not in last))
            last = told
        waits = {reason["code"] for reason in one["reasons"]}
        if one["phase"] in ENDED or (one["phase"] == "halted" and "HALTED" in waits):
            break
        if until is not None and time.monotonic() >= until:
            raise CommandFailed(Exit.TIMEOUT, f"rollout {one['id']} is {one['phase']}")
        time.sleep(LOOK_SECONDS)
    if one["phase"] != "done":
        raise CommandFailed(Exit.CONDITION_NOT_MET, f"rollout {one['id']} is {one['phase']}")
    if one["counts"].get("confirmed", 0) != one["total"]:
        raise CommandFailed(Exit.PARTIAL, f"not every target is confirmed: {_counts(one)}")


def _order(place: Place, rollout_id: str, verb: str, **more: Any) -> None:
    one = _call(place, "POST", f"{_path(rollout_id)}/{verb}", more)
    click.echo(f"rollout {one['id']} is {one['phase']}")


reason_option = click.option("--reason", default="", help="For whoever wonders; kept in its history.")


def _plain_order(verb: str, text: str) -> click.Command:
    @click.command(verb, help=text)
    @click.argument("rollout_id", metavar="ID")
    @reason_option
    @rest_options
    def command(rollout_id: str, reason: str, **where: Any) -> None:
        _order(Place(**where), rollout_id, verb, reason=reason)

    return command


for _verb, _text in {
    "pause": "Start nothing more until it is resumed; what is in flight ends.",
    "resume": "Go on after a pause, or after a halt in spite of what has failed.",
    "abort": "End it: what is in flight ends, what has moved stays, the rest is never started.",
    "undo": "Bring everything that has moved back to the version that it had.",
}.items():
    rollout.add_command(_plain_order(_verb, _text))


@rollout.command()
@click.argument("rollout_id", metavar="ID")
@click.argument("targets", nargs=-1)
@reason_option
@rest_options
def retry(rollout_id: str, targets: tuple[str, ...], reason: str, **where: Any) -> None:
    """Ask targets that failed, or were not reached, once more; all of them if none are named."""
    _order(Place(**where), rollout_id, "retry", reason=reason, targets=list(targets))


@rollout.command()
@click.argument("rollout_id", metavar="ID")
@click.argument("targets", nargs=-1, required=True)
@reason_option
@rest_options
def skip(rollout_id: str, targets: tuple[str, ...], reason: str, **where: Any) -> None:
    """Leave targets out: they are neither asked nor waited for, nor counted as failed."""
    _order(Place(**where), rollout_id, "skip", reason=reason, targets=list(targets))


@rollout.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--wave", type=int, default=0, help="Counted from 1; the next one when not given.")
@rest_options
def approve(rollout_id: str, wave: int, **where: Any) -> None:
    """Let a wave start that needs an approval."""
    _order(Place(**where), rollout_id, "approve", wave=wave)


@rollout.command()
@rest_options
@format_option
def subjects(output: Format, **where: Any) -> None:
    """Show what can be rolled out, and what gates can ask for."""
    found = _call(Place(**where), "GET", "/rollout-subjects")["subjects"]
    rows = [
        [
            Cell(text=one["name"]),
            Cell(text=one["summary"]),
            Cell(text=", ".join(measure["name"] for measure in one["measures"]) or "-"),
        ]
        for one in found
    ]
    empty = "Nothing that runs here can be rolled out."
    emit(output, found, PrintedTable(columns=("SUBJECT", "WHAT", "GATES"), rows=rows, empty=empty))


@rollout.group()
def policy() -> None:
    """Make every new version at a scope a rollout."""


@policy.command("set")
@click.argument("subject")
@click.argument("scope")
@click.option(
    "--policy",
    "policy_file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file in YAML or JSON with waves, budgets and gates.",
)
@click.option("--manual", is_flag=True, help="New versions wait until somebody starts their rollout.")
@click.option("--supersedes", is_flag=True, help="A new version ends the rollout of the one before.")
@rest_options
def set_policy(
    subject: str, scope: str, policy_file: Path, manual: bool, supersedes: bool, **where: Any
) -> None:
    """Make every new version of SUBJECT at and below SCOPE a rollout."""
    request = {
        "subject": subject,
        "scope": scope,
        "policy": policy_of(policy_file) or {},
        "manual": manual,
        "supersedes": supersedes,
    }
    made = _call(Place(**where), "PUT", "/rollout-policies", request)
    click.echo(f"new versions of {made['subject']} at {made['scope'] or 'every scope'} are rolled out")


@policy.command("remove")
@click.argument("subject")
@click.argument("scope")
@rest_options
def remove_policy(subject: str, scope: str, **where: Any) -> None:
    """Let new versions go to everyone at once again; those that wait go out with the next."""
    _call(Place(**where), "DELETE", "/rollout-policies", subject=subject, scope=scope)
    click.echo(f"new versions of {subject} at {scope or 'every scope'} go to everyone at once")


@policy.command("list")
@rest_options
@format_option
def list_policies(output: Format, **where: Any) -> None:
    """List the policies."""
    found = _call(Place(**where), "GET", "/rollout-policies")["policies"]
    rows = [
        [
            Cell(text=one["subject"]),
            Cell(text=one["scope"] or "everywhere"),
            Cell(text=", ".join(one["policy"]["waves"])),
            Cell(text="manual" if one["manual"] else "automatic"),
            Cell(text=one["actor"] or "-"),
        ]
        for one in found
    ]
    columns = ("SUBJECT", "SCOPE", "WAVES", "STARTS", "BY")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="There are no rollout policies."))


# Policies in files.


def policy_of(path: Path | None) -> dict[str, Any] | None:
    """The policy of a file in YAML or JSON, with the names that the fleet's own API has."""
    if path is None:
        return None
    import yaml

    try:
        if not path.is_file():
            raise click.UsageError(f"{path} is not a file")
        with path.open(encoding="utf-8") as file:
            text = file.read(FILE_LIMIT + 1)
        found = yaml.safe_load(text) if len(text) <= FILE_LIMIT else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    if len(text) > FILE_LIMIT or _is_large(found):
        raise click.UsageError(f"{path} is not a policy: it is too long")
    if not isinstance(found, dict):
        raise click.UsageError(f"{path} is not a policy: it has no fields")
    waves = found.get("waves", [])
    return found | ({"waves": [str(one) for one in waves]} if isinstance(waves, list) and waves else {})


def _is_large(found: Any) -> bool:
    """Whether it has more values than any policy; what stands there by reference counts each time."""
    seen, left = 0, [found]
    while left and seen <= VALUES_LIMIT:
        one = left.pop()
        seen += 1
        left += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
    return seen > VALUES_LIMIT


def read_policy(path: Path) -> Mapping[str, Any]:
    """The same with the names that the resource API has."""
    found: Mapping[str, Any] = camel(policy_of(path))
    return found


def camel(value: Any) -> Any:
    """Names of fields as `maxFailures` instead of `max_failures`, at every depth."""
    if isinstance(value, Mapping):
        return {
            re.sub(r"_([a-z])", lambda found: found[1].upper(), str(key)): camel(one)
            for key, one in value.items()
        }
    return [camel(one) for one in value] if isinstance(value, list) else value

"""`fleetplane get`, `describe`, `watch`, `delete` and `kinds`: every resource by one set of verbs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import Cell, PrintedTable, emit_table, flat, say, working
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.resources.kinds import (
    Kinds,
    complete_targets,
    scope_of,
    scope_options,
    targets,
)
from fleetplane.cli.resources.show import OutputForm, emit_data, emit_rows, form_option, safe_json, style_of
from fleetplane.client.places import Place

if TYPE_CHECKING:
    from fleetplane.client.calls import Request, Response
    from fleetplane.client.objects import Object
    from fleetplane.client.sync import Fleet, Resources

SIMPLE_NAME = re.compile(r"[A-Za-z0-9._:-]+")
"""Names that a selector of fields takes as they are."""
WAIT_SECONDS = 300.0


def connected(where: Mapping[str, Any]) -> Fleet:
    """The server that the options of a verb mean; a call that takes long gives a sign of life."""
    from fleetplane.client.places import resolve
    from fleetplane.client.sync import Fleet
    from fleetplane.client.transport import Transport

    class Telling(Transport):
        def send(self, request: Request) -> Response:
            with working(f"waiting for {self.endpoint}"):
                return super().send(request)

    endpoint = resolve(Place(**where))
    return Fleet(endpoint, transport=Telling(endpoint))


def selector_options(command: Any) -> Any:
    """Which objects of a kind."""
    for option in (
        click.option("--sort-by", default="", metavar="PATH", help="Such as metadata.name, or -status.cpu."),
        click.option(
            "--field-selector", "fields", default="", metavar="FIELDS", help="Such as status.state=connected."
        ),
        click.option("-l", "--selector", "labels", default="", metavar="LABELS", help="Such as role=web."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND[/NAME]…", shell_complete=complete_targets)
@selector_options
@scope_options
@click.option("--wait-for", default="", metavar="WHAT", help="Ready, .status.state=connected, deleted.")
@click.option(
    "--wait-timeout", type=DURATION, default=WAIT_SECONDS, show_default="5m", help="For --wait-for."
)
@form_option
@rest_options
def get(
    what: tuple[str, ...],
    labels: str,
    fields: str,
    sort_by: str,
    scope: str,
    tenant: str,
    all_scopes: bool,
    wait_for: str,
    wait_timeout: float,
    output: OutputForm,
    **where: Any,
) -> None:
    """Show objects: all of a kind, or those that are named.

    \b
    fleetplane get gpus
    fleetplane get edge-nodes -l env=prod -o wide
    fleetplane get gpu/NAME -o yaml
    fleetplane get gpus,edge-nodes -A
    fleetplane get edge-node/NAME --wait-for .status.state=connected
    """
    from fleetplane.client.requests import Query

    wanted = list(targets(what))
    with connected(where) as fleet:
        kinds = Kinds(fleet)
        place = scope_of(fleet, scope, tenant, all_scopes)
        if wait_for:
            _wait(kinds, wanted, wait_for, place, wait_timeout)
            if wait_for == "deleted":
                return
        query = Query(scope=place, labels=labels, fields=fields, sort=sort_by)
        if wanted[0][1]:
            _show_named(kinds, wanted, place, output)
        elif output.is_table:
            for kind, _ in wanted:
                _show_table(kinds, kind, query, output, fleet, several=len(wanted) > 1)
        else:
            items = [one for kind, _ in wanted for one in _items(kinds, kind, query)]
            emit_data(output, {"kind": "list", "items": items})


def _items(kinds: Kinds, kind: str, query: Any) -> list[Any]:
    def read(resources: Resources) -> list[Any]:
        return [one for page, _ in resources.pages(query) for one in page]

    return kinds.using(kind, read)


def _show_table(
    kinds: Kinds, kind: str, query: Any, form: OutputForm, fleet: Fleet, *, several: bool
) -> None:
    def read(resources: Resources) -> tuple[str, list[Any]]:
        return resources.plural, list(resources.contents(query, as_table=True))

    plural, contents = kinds.using(kind, read)
    wide = form.name == "wide"
    emit_rows(contents, wide=wide, kind=plural if several else "", empty=lambda: empty(plural, query, fleet))


def empty(plural: str, query: Any, fleet: Fleet) -> str:
    """Why a list may be empty: where was looked, and with what."""
    where = f"at {query.scope}" if query.scope else "anywhere that you may look"
    asked = (("labels", query.labels), ("fields", query.fields))
    chosen = [f"{name} {text}" for name, text in asked if text]
    with_what = f", with {' and '.join(chosen)}" if chosen else ""
    server = f"context {fleet.endpoint.context}" if fleet.endpoint.context else str(fleet.endpoint)
    advice = "; -A looks in every scope" if query.scope else ""
    return f"no {plural} {where}{with_what} ({server}{advice})"


def _show_named(kinds: Kinds, wanted: list[tuple[str, str]], scope: str, form: OutputForm) -> None:
    from fleetplane.client.requests import Query

    several = len({kind for kind, _ in wanted}) > 1
    found: list[Mapping[str, Any]] = []
    for kind, name in wanted:
        if not form.is_table:
            found.append(_object(kinds, kind, name, scope).raw)
        elif SIMPLE_NAME.fullmatch(name):
            query = Query(scope=scope, fields=f"metadata.name={name}")

            def read(resources: Resources, query: Query = query) -> tuple[str, list[Any]]:
                return resources.plural, list(resources.contents(query, as_table=True))

            plural, contents = kinds.using(kind, read)
            if not contents[0]["rows"]:
                _object(kinds, kind, name, scope)  # it is not there, or called so by another of its names
            emit_rows(contents, wide=form.name == "wide", kind=plural if several else "", empty=str)
        else:
            _print_object(_object(kinds, kind, name, scope))
    if not form.is_table:
        emit_data(form, found[0] if len(found) == 1 else {"kind": "list", "items": found})


def _object(kinds: Kinds, kind: str, name: str, scope: str) -> Object:
    return kinds.using(kind, lambda resources: resources.get(name, scope=scope))


def _wait(kinds: Kinds, wanted: list[tuple[str, str]], text: str, scope: str, seconds: float) -> None:
    from fleetplane.client.objects import Expectation
    from fleetplane.kernel.errors import InvalidArgument

    try:
        Expectation.parsed(text)
    except ValueError as error:
        raise InvalidArgument(str(error), field="--wait-for") from error
    if not all(name for _, name in wanted):
        raise click.UsageError("--wait-for needs the names of objects.")
    for kind, name in wanted:
        say(f"waiting for {kind}/{name}: {text}")

        def wait(resources: Resources, name: str = name) -> None:
            resources.wait_for(name, text, scope=scope, seconds=seconds)

        with working(f"waiting for {kind}/{name}: {text}"):
            kinds.using(kind, wait)


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND/NAME", shell_complete=complete_targets)
@scope_options
@rest_options
def describe(what: tuple[str, ...], scope: str, tenant: str, all_scopes: bool, **where: Any) -> None:
    """Show everything about objects, with their conditions and why they are as they are."""
    from fleetplane.kernel.errors import FleetplaneError

    with connected(where) as fleet:
        kinds = Kinds(fleet)
        place = scope_of(fleet, scope, tenant, all_scopes)
        for number, (kind, name) in enumerate(targets(what)):
            if not name:
                raise click.UsageError("name objects: KIND/NAME, or KIND NAME….")
            resource = kinds.named(kind)
            resources = fleet.resource(str(resource["plural"]))
            found = resources.get(name, scope=place)
            if number:
                click.echo()
            _print_object(found)
            if "explain" in resource.get("verbs", ()):
                try:
                    _print_explained(resources.explain(found.name, scope=found.metadata.scope))
                except FleetplaneError as error:  # the object is shown; why it is so is not known
                    say(f"not explained: {error.message}")


def _print_object(found: Object) -> None:
    from fleetplane.cli.output import yaml_text

    metadata = found.metadata
    head = {
        "Name": metadata.name,
        "Kind": found.kind,
        "Scope": metadata.scope,
        "Labels": ", ".join(f"{key}={value}" for key, value in sorted(metadata.labels.items())) or "-",
        "Created": metadata.created_at or "-",
        "Revision": f"{metadata.revision} (generation {metadata.generation})",
    }
    for key, value in head.items():
        click.echo(f"{key + ':':<10} {flat(str(value))}")
    for title, part in (("Spec", found.spec), ("Status", found.status)):
        if part:
            click.echo(f"{title}:")
            for line in yaml_text(dict(part)).splitlines():
                click.echo(f"  {flat(line)}")
    if found.conditions:
        click.echo("Conditions:")
        rows = [
            [
                Cell(text=f"  {one.type}"),
                Cell(text=one.status, style=style_of(one.status)),
                Cell(text=one.reason or "-"),
                Cell(text=one.changed_at or "-"),
                Cell(text=one.message or "-"),
            ]
            for one in found.conditions
        ]
        columns = ("  TYPE", "STATUS", "REASON", "CHANGED", "MESSAGE")
        emit_table(PrintedTable(columns=columns, rows=rows, empty=""))


def _print_explained(told: Mapping[str, Any]) -> None:
    findings = told.get("findings") or ()
    if not findings:
        click.echo("Why:       nothing is known to be in the way")
        return
    click.echo("Why:")
    for finding in findings:
        reasons = finding.get("reasons") or ()
        for reason in reasons:
            subject = f"{reason['subject']}: " if reason.get("subject") else ""
            click.echo(flat(f"  {reason.get('code', '')}  {subject}{reason.get('message', '')}"))


@click.command()
@click.argument("what", metavar="KIND[,KIND…]", shell_complete=complete_targets)
@selector_options
@scope_options
@click.option("--for", "seconds", type=DURATION, help="Stop after this long. Default: until interrupted.")
@click.option("--only-changes", is_flag=True, help="Leave out what is there at the beginning.")
@form_option
@rest_options
def watch(
    what: str,
    labels: str,
    fields: str,
    sort_by: str,
    scope: str,
    tenant: str,
    all_scopes: bool,
    seconds: float | None,
    only_changes: bool,
    output: OutputForm,
    **where: Any,
) -> None:
    """Follow objects of one kind or several, in one stream.

    What is there comes first, then every change, one a line; with -o json each is one JSON object on its own
    line. Survives restarts of the server, and loses nothing by them.
    """
    if sort_by:
        raise click.UsageError("changes come as they happen; --sort-by is for `get`.")
    with connected(where) as fleet:
        kinds = Kinds(fleet)
        place = scope_of(fleet, scope, tenant, all_scopes)
        follow(
            fleet,
            kinds,
            [kind for kind, _ in targets((what,))],
            place,
            output,
            labels=labels,
            fields=fields,
            seconds=seconds,
            only_changes=only_changes,
        )


def follow(
    fleet: Fleet,
    kinds: Kinds,
    words: list[str],
    scope: str,
    form: OutputForm,
    *,
    labels: str = "",
    fields: str = "",
    seconds: float | None = None,
    only_changes: bool = False,
) -> None:
    """Print every change of some kinds, one a line."""
    from fleetplane.client.requests import watched

    plurals = [str(kinds.named(word)["plural"]) for word in words]
    changes = fleet.watch(
        ",".join(watched(plural, scope) for plural in plurals),
        labels=labels,
        fields=fields,
        seconds=seconds,
        after=_now(fleet) if only_changes else None,
        on_gap=on_gap,
    )
    for change in changes:
        if change.object.kind == "event" and change.type == "deleted":
            continue  # so many are kept, and the oldest gives way
        told = {"type": change.type, "object": change.object.raw}
        if form.is_table:
            click.echo(_line(change.type, change.object))
        elif form.name == "json":
            click.echo(safe_json(told))
        elif form.name == "yaml":
            click.echo("---")
            emit_data(form, told)
        else:
            emit_data(form, change.object.raw if form.name == "name" else told)


def on_gap(error: BaseException | None, delay: float) -> None:
    """Tell people why a watch ended, and when it goes on."""
    if error is not None:
        say(f"the watch ended ({error}); again in {delay:.1f} s")


def _now(fleet: Fleet) -> int:
    revision = fleet.discover().get("revision")
    return revision if isinstance(revision, int) else 0


def _line(type_: str, found: Object) -> str:
    """One change for people: what happened to what, and how it is now."""
    conditions = " ".join(
        f"{one.type}={one.status}" + (f"({one.reason})" if one.reason and one.status != "True" else "")
        for one in found.conditions
    )
    brief = " ".join(
        f"{key}={value}"
        for key, value in found.status.items()
        if isinstance(value, str | int) and value != ""
    )
    where = "" if found.metadata.scope == "/" else f" {found.metadata.scope}"
    if found.kind == "event":
        spec = found.spec
        details = " ".join(f"{key}={value}" for key, value in spec["details"].items())
        return flat(f"{spec['occurredAt']} {spec['type']} {spec['about']}{where}  {details}".rstrip())
    return flat(f"{type_:<8} {found.kind}/{found.name}{where}  {conditions or brief}".rstrip())


@click.command()
@click.option("-f", "--follow", "goes_on", is_flag=True, help="Go on with what happens from now on.")
@selector_options
@scope_options
@form_option
@rest_options
def events(
    goes_on: bool,
    labels: str,
    fields: str,
    sort_by: str,
    scope: str,
    tenant: str,
    all_scopes: bool,
    output: OutputForm,
    **where: Any,
) -> None:
    """Show what happened; with -f, go on with what happens."""
    from fleetplane.client.requests import Query

    with connected(where) as fleet:
        kinds = Kinds(fleet)
        place = scope_of(fleet, scope, tenant, all_scopes)
        if goes_on:
            follow(fleet, kinds, ["events"], place, output, labels=labels, fields=fields)
            return
        query = Query(scope=place, labels=labels, fields=fields, sort=sort_by or ".spec.occurredAt")
        if output.is_table:
            _show_table(kinds, "events", query, output, fleet, several=False)
        else:
            emit_data(output, {"kind": "list", "items": _items(kinds, "events", query)})


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="KIND/NAME…", shell_complete=complete_targets)
@scope_options
@click.option("--dry-run", is_flag=True, help="Have the server say what would happen, and change nothing.")
@click.option("--wait", is_flag=True, help="Until they are gone.")
@click.option("--wait-timeout", type=DURATION, default=WAIT_SECONDS, show_default="5m", help="For --wait.")
@rest_options
def delete(
    what: tuple[str, ...],
    scope: str,
    tenant: str,
    all_scopes: bool,
    dry_run: bool,
    wait: bool,
    wait_timeout: float,
    **where: Any,
) -> None:
    """Delete objects by name."""
    from fleetplane.cli.exits import CommandFailed, Exit, explain
    from fleetplane.kernel.errors import FleetplaneError

    wanted = list(targets(what))
    if not all(name for _, name in wanted):
        raise click.UsageError("name objects: KIND/NAME, or KIND NAME….")
    failed: list[FleetplaneError] = []
    with connected(where) as fleet:
        kinds = Kinds(fleet)
        place = scope_of(fleet, scope, tenant, all_scopes)
        for kind, name in wanted:
            resources = fleet.resource(str(kinds.named(kind)["plural"]))
            try:
                resources.delete(name, scope=place, dry_run=dry_run)
            except FleetplaneError as error:
                if len(wanted) == 1:
                    raise
                failed.append(error)
                told = explain(error)
                say(f"fleetplane: {kind}/{name}: {told.line if told else error}")
                continue
            if wait and not dry_run:
                resources.wait_for(name, "deleted", scope=place, seconds=wait_timeout)
            click.echo(flat(f"{kind}/{name} {'would be' if dry_run else 'is'} deleted"))
    if failed:
        raise CommandFailed(Exit.PARTIAL, f"{len(failed)} of {len(wanted)} were not deleted")


@click.command()
@form_option
@rest_options
def kinds(output: OutputForm, **where: Any) -> None:
    """List the kinds of things that a server looks after, and what you may do with each."""
    with connected(where) as fleet:
        found = Kinds(fleet).all()
    if not output.is_table:
        emit_data(
            output,
            {"kind": "kinds", "items": [{**one, "metadata": {"name": one["plural"]}} for one in found]},
        )
        return
    rows = [
        [
            Cell(text=str(one["plural"])),
            Cell(text=",".join(map(str, one.get("shortNames") or ())) or "-"),
            Cell(text=",".join(map(str, one.get("may") or ())) or "-"),
            Cell(text=",".join(str(act["name"]) for act in one.get("actions") or ()) or "-"),
            Cell(text=str(one.get("summary") or "")),
        ]
        for one in found
    ]
    emit_table(
        PrintedTable(
            columns=("NAME", "SHORT", "YOU MAY", "ACTIONS", "SUMMARY"), rows=rows, empty="nothing to see"
        )
    )

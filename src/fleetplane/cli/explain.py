"""`fleetplane explain`: why a thing of any domain is not as it should be.

KIND/NAME is an object of the resource API, asked for with its client. DOMAIN KIND NAME is a thing as its
domain knows it, over REST: the owner asks at the server's own socket, anyone else with a token that the
domain of the thing accepts. Everybody is shown the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.resources.kinds import complete_targets
from fleetplane.client.places import Place

EXPLAIN_PATH = "/v1/fleet/explain"
COLUMNS = ("BY", "LOOKED", "AGAIN", "CODE", "WHY")
CLEAR = "nothing is known to be in the way."


@click.command()
@click.argument(
    "what", nargs=-1, metavar="[KIND/NAME | DOMAIN KIND NAME | KEY]", shell_complete=complete_targets
)
@click.option("--scope", default="", help="Where to look for NAME: /tenants/acme, or tenant/acme.")
@click.option("--tenant", default="", metavar="NAME", help="The scope of a tenant, for KIND/NAME.")
@click.option("--kinds", is_flag=True, help="Show which kinds of things can be asked about, and leave.")
@rest_options
@format_option
def explain(
    what: tuple[str, ...], scope: str, tenant: str, kinds: bool, output: Format, **where: Any
) -> None:
    """Why is this not happening?

    KIND and NAME are those of `fleetplane get`: `explain gpu/NAME`, `explain group/workers`.

    DOMAIN, KIND and NAME name a thing as its domain does: `edge daemon ID`, `proxies agent ID`, `proxies
    host ID`, `proxies certificate ID`, `boards board 5`, `boards pin 7`, `gpus gpu NAME`, `instances group
    workers`. KEY alone is a group of instances as tenant/group; everything about those when not given.

    Answered by the controller that is not doing it, and by the thing's own record: what is waited for, and
    when it is looked at next.
    """
    place = Place(**where)
    if kinds:
        _show_kinds(place, output)
    elif len(what) == 3 and not tenant:
        _show(_explained(place, *what, scope=scope), output)
    elif len(what) == 2 or (len(what) == 1 and "/" in what[0]):
        if not _show_object(what, place, output, scope=scope, tenant=tenant):
            _explain_key(what[0], place, output, scope=scope or tenant)
    elif len(what) < 2:
        _explain_key("".join(what), place, output, scope=scope or tenant)
    else:
        raise click.UsageError("name KIND/NAME, or DOMAIN, KIND and NAME; --kinds shows which there are.")


def _show_object(what: Sequence[str], place: Place, output: Format, *, scope: str, tenant: str) -> bool:
    """Explain an object of the resource API; False if KIND/NAME is a key of another sort on this machine."""
    from fleetplane.cli.resources.kinds import Kinds, named_target, scope_of
    from fleetplane.client.sync import connect as connected
    from fleetplane.kernel.errors import NotFound, Unavailable

    kind, name = named_target(what)
    with connected(place) as fleet:
        try:
            resource = Kinds(fleet).named(kind)
        except (NotFound, Unavailable):  # a server that is away is asked once more, and is away then too
            if len(what) == 1 and not (scope or tenant) and fleet.endpoint.is_local:
                return False
            raise
        if "explain" not in resource.get("verbs", ()):
            raise click.UsageError(f"{resource['plural']} are not explained; `describe` shows all of one.")
        resources = fleet.resource(str(resource["plural"]))
        found = resources.explain(name, scope=scope_of(fleet, scope, tenant))
    emit(output, dict(found), explanation_table(found))
    return True


def explanation_table(found: Mapping[str, Any]) -> PrintedTable:
    """What stands in an object's way, as the resource API tells it. Pure."""
    about = found.get("object") or {}
    rows = []
    if frozen := found.get("frozen"):
        words = f"{frozen.get('reason')} (by {frozen.get('frozenBy')}, at {frozen.get('scope') or '/'})"
        rows.append(_row("freeze", frozen.get("frozenAt"), frozen.get("expiresAt"), "FROZEN", words))
    for finding in found.get("findings") or ():
        told = [(one.get("code"), _about(one)) for one in finding.get("reasons") or ()]
        if finding.get("lastError"):
            told.append(("FAILED", f"{finding['lastError']} ({finding.get('failures')} in a row)"))
        rows += [
            _row(finding.get("controller"), finding.get("since"), finding.get("nextDue"), code, message)
            for code, message in told
        ]
    empty = f"{about.get('resource')}/{about.get('name')} in {about.get('scope')}: {CLEAR}"
    return PrintedTable(columns=COLUMNS, rows=rows, empty=empty)


def _row(by: Any, looked: Any, again: Any, code: Any, why: Any) -> list[Cell]:
    return [
        Cell(text=str(by)),
        Cell(text=str(looked or "-")),
        Cell(text=str(again or "-")),
        Cell(text=str(code), style="yellow"),
        Cell(text=str(why)),
    ]


def _explained(place: Place, domain: str, kind: str, name: str, *, scope: str) -> Mapping[str, Any]:
    path = "/".join(quote(part, safe="") for part in (domain, kind, name))
    with connect(place) as client:
        answer: Mapping[str, Any] = client.call(
            "GET", f"{EXPLAIN_PATH}/{path}", query={"scope": scope} if scope else None
        )
    return answer


def _show(found: Mapping[str, Any], output: Format) -> None:
    rows = []
    for finding in found["findings"]:
        told = [(one["code"], _about(one)) for one in finding["reasons"]]
        if finding["last_error"]:
            told.append(("FAILED", f"{finding['last_error']} ({finding['failures']} in a row)"))
        rows += [
            _row(finding["controller"], finding["at"], finding["next_due"], code, message)
            for code, message in told
        ]
    empty = f"{found['kind']} {found['name']} in {found['scope']}: {CLEAR}"
    emit(output, found, PrintedTable(columns=COLUMNS, rows=rows, empty=empty))


def _about(reason: Mapping[str, Any]) -> str:
    message = str(reason.get("message", ""))
    return f"{reason['subject']}: {message}" if reason.get("subject") else message


def _explain_key(key: str, place: Place, output: Format, *, scope: str) -> None:
    """A key without a domain, in the way of whichever installed domain takes such."""
    from fleetplane.domains import discovery
    from fleetplane.domains.declaration import load

    if scope:
        raise click.UsageError(
            "a key names its tenant itself; --scope is for KIND/NAME, or DOMAIN KIND NAME."
        )
    takers = [one.explain_key for one in discovery.installed().declarations if one.explain_key]
    if not takers:
        raise click.UsageError("name DOMAIN, KIND and NAME; --kinds shows which there are.")
    load(takers[0])(key, place, output)


def _show_kinds(place: Place, output: Format) -> None:
    with connect(place) as client:
        found = client.call("GET", EXPLAIN_PATH)["kinds"]
    data = [{"domain": one["domain"], "kind": one["kind"], "tells": one["summary"]} for one in found]
    rows = [[Cell(text=text) for text in one.values()] for one in data]
    emit(output, data, PrintedTable(columns=("DOMAIN", "KIND", "TELLS"), rows=rows, empty="no kinds"))

"""`fleetplane proxies import`: an existing NGINX configuration as typed hosts and upstreams."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.domains.proxies.cli.observing import agent_named
from fleetplane.domains.proxies.cli.proxies import PAGE, PREFIX, client, proxy_options
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient
    from fleetplane.domains.proxies.importing.report import FoundCertificate, Imported

SERVED = ("active", "renewing")
"""States of certificates that hosts can present."""
STYLES = {"understood": "green", "kept raw": "yellow", "refused": "red", "certificate missing": "red"}


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--agent", default="", metavar="AGENT", help="Import what this agent observes, not a PATH.")
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="ADDRESS",
    help="An address that the agents serve on: servers of it alone are imported, too; repeat it.",
)
@click.option("--apply", "apply_", is_flag=True, help="Write it to the workspace, not only the report.")
@click.option(
    "--confirm-raw", is_flag=True, help="With --apply: take raw text along; needs an administrator."
)
@click.option(
    "--certificate",
    "chosen",
    multiple=True,
    metavar="FILE=ID",
    help="With --agent: the workspace's certificate for one of its files; repeat it.",
)
@click.option(
    "--send-keys",
    is_flag=True,
    help="With --agent and --apply: have it send certificates that are missing, with their keys.",
)
@format_option
@proxy_options
def import_config(
    path: Path | None,
    agent: str,
    addresses: tuple[str, ...],
    apply_: bool,
    confirm_raw: bool,
    chosen: tuple[str, ...],
    send_keys: bool,
    output: Format,
    workspace: str,
    **where: Any,
) -> None:
    """Bring an existing NGINX configuration, with its includes, into a workspace.

        fleetplane proxies import /etc/nginx/nginx.conf
        fleetplane proxies import --agent web-1

    Reports what became of every directive: understood, left to the agent, kept raw for an administrator to
    confirm, or refused and why. Nothing is changed without --apply. What cannot be imported, or not without
    what may keep strangers away from it, answers 503. Hosts and upstreams that the workspace has under the
    same name are replaced.

    With --agent, private keys stay where they are: hosts get the certificates that the workspace has for
    their names, and the report tells which are missing. With --send-keys the agent sends those to the server,
    sealed, if it was started with --observed-keys.
    """
    if (path is None) == (not agent):
        raise InvalidArgument("name a PATH or --agent, and not both", field="PATH")
    ids = dict(_pair(one) for one in chosen)
    placed: dict[str, str] = {}
    with ExitStack() as stack:
        # A report of one's own files needs no server.
        server = stack.enter_context(client(where)) if agent or apply_ else None
        if server is not None and path is None:
            made, config = _shown(server, workspace, agent, addresses)
            placed = _in_workspace(server, workspace, made.certificates, ids)
            _note_missing(made, placed)
        else:
            assert path is not None
            made, config = _read(path, addresses), path
        if server is not None and apply_:
            if made.has_raw and not confirm_raw:
                raise FailedPrecondition(
                    "some directives have no typed form", hint="read the report, then give --confirm-raw"
                )
            if send_keys and path is None:
                placed |= _sent(server, workspace, agent, made, placed)
            if path is not None:
                placed = _uploaded(server, workspace, path, made.certificates)
            _require_all(made, placed)
            bundle = made.bundle(placed, raw=confirm_raw)
            server.call("POST", f"{PREFIX}/workspaces/{workspace}/import", body=bundle)
    _tell(made, config, output)


def _tell(made: Imported, config: Path, output: Format) -> None:
    rows = [
        [
            Cell(text=f"{Path(line.file).name or config.name}:{line.line}"),
            Cell(text=line.text),
            Cell(text=line.outcome, style=STYLES.get(line.outcome, "")),
            Cell(text=line.why),
        ]
        for line in made.report
    ]
    told = [msgspec.to_builtins(line) for line in made.report]
    emit(
        output, told, PrintedTable(columns=("WHERE", "DIRECTIVE", "OUTCOME", "WHY"), rows=rows, empty="empty")
    )


def _pair(text: str) -> tuple[str, str]:
    file, equals, identity = text.rpartition("=")
    if not equals or not file or not identity:
        raise InvalidArgument(f"{text!r} is not FILE=ID", field="--certificate")
    return file, identity


# From files of this machine.


def _read(path: Path, addresses: Collection[str]) -> Imported:
    from fleetplane.domains.proxies.importing.conversion import convert
    from fleetplane.domains.proxies.importing.reading import read

    return convert(read(path), addresses)


def _uploaded(
    server: RestClient, workspace: str, path: Path, certificates: Iterable[FoundCertificate]
) -> dict[str, str]:
    files = [(one, _pem(path, one.certificate), _pem(path, one.key)) for one in certificates]
    ids = {}
    for one, chain, key in files:
        body = {"certificate": chain, "private_key": key, "domain": one.domain or None}
        made = server.call("POST", f"{PREFIX}/workspaces/{workspace}/certificates/import", body=body)
        ids[one.id] = made["id"]
    return ids


def _pem(config: Path, name: str) -> str:
    """A file that the configuration names, as NGINX would find it."""
    file = config.parent / name
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}", field="PATH") from error


# From what an agent shows.


def _shown(
    server: RestClient, workspace: str, agent: str, addresses: Collection[str]
) -> tuple[Imported, Path]:
    from fleetplane.domains.proxies.importing.conversion import convert
    from fleetplane.domains.proxies.importing.reading import read_shown
    from fleetplane.domains.proxies.importing.report import ImportLine, StatementOutcome

    found = agent_named(server, workspace, agent)
    told = server.call("GET", f"{PREFIX}/agents/{found['id']}/observed")
    config = Path(told["config_path"])
    made = convert(read_shown(config, {one["path"]: one["text"] for one in told["files"]}), addresses)
    for problem in told["problems"]:
        made.report.append(
            ImportLine(
                file=str(config),
                line=0,
                text=problem,
                outcome=StatementOutcome.REFUSED,
                why="the agent does not show it",
            )
        )
    return made, config


def _in_workspace(
    server: RestClient, workspace: str, certificates: Iterable[FoundCertificate], chosen: Mapping[str, str]
) -> dict[str, str]:
    from fleetplane.domains.proxies.importing.report import placed_by_name

    known: dict[str, str] = {}
    page, total = 1, 1
    while (page - 1) * PAGE < total:
        asked = {"page": str(page), "per_page": str(PAGE)}
        told = server.call("GET", f"{PREFIX}/workspaces/{workspace}/certificates", query=asked)
        known |= {one["domain"]: one["id"] for one in told["data"] if one["status"] in SERVED}
        page, total = page + 1, told["meta"]["total"]
    return placed_by_name(certificates, known, chosen)


def _note_missing(made: Imported, placed: Mapping[str, str]) -> None:
    from fleetplane.domains.proxies.importing.report import ImportLine, StatementOutcome

    for one in made.certificates:
        if one.id not in placed:
            name = one.domain or "its host"
            why = f"import it with its key for {name}, or give --certificate {one.certificate}=ID"
            text = f"ssl_certificate {one.certificate}"
            made.report.append(
                ImportLine(file="", line=0, text=text, outcome=StatementOutcome.MISSING, why=why)
            )


def _sent(
    server: RestClient, workspace: str, agent: str, made: Imported, placed: Mapping[str, str]
) -> dict[str, str]:
    path = f"{PREFIX}/agents/{agent_named(server, workspace, agent)['id']}/observed/certificates"
    ids = {}
    for one in made.certificates:
        if one.id not in placed:
            body = {"certificate": one.certificate, "domain": one.domain or None}
            ids[one.id] = server.call("POST", path, body=body)["id"]
    return ids


def _require_all(made: Imported, placed: Mapping[str, str]) -> None:
    missing = [one.certificate for one in made.certificates if one.id not in placed]
    if missing:
        raise FailedPrecondition(
            f"the workspace has no certificate for {', '.join(missing)}",
            hint="import them with their keys, or give --certificate FILE=ID",
        )

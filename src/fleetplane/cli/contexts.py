"""`fleetplane login`, `context` and `open`: known servers, which is meant, a link to its console."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option, say
from fleetplane.cli.parameters import DURATION, owner_options
from fleetplane.client.contexts import LOCAL, Context, ContextFile, Contexts, check_name

if TYPE_CHECKING:
    from urllib.parse import SplitResult


PAGE = "/ui/"
ROLE = "owner"
SESSION_SECONDS = 12 * 3600.0
CALL_SECONDS = 30.0
UNSPECIFIED = frozenset({"0.0.0.0", "::"})  # noqa: S104  # recognised, not bound


@click.command("open")
@click.option(
    "--role",
    "roles",
    multiple=True,
    default=(ROLE,),
    show_default=True,
    metavar="ROLE",
    help="What the session may do, such as viewer or operator; can be given often.",
)
@click.option("--tenant", default="", help="The only tenant that the session sees; all when absent.")
@click.option(
    "--for",
    "seconds",
    type=DURATION,
    default=SESSION_SECONDS,
    show_default="12h",
    help="How long the session lasts; at most 12h.",
)
@owner_options
def open_console(roles: tuple[str, ...], tenant: str, seconds: float, data_dir: Path) -> None:
    """Print a link to the console that signs in.

    The link is good once and for an hour. It stands in the part of the address that browsers keep to
    themselves, and becomes a cookie that no script can read.
    """
    from fleetplane.cli.clients.owner_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb
    from fleetplane.kernel.errors import Unavailable

    with OperatorsClient(data_dir, call_seconds=CALL_SECONDS) as owner:
        request = pb.OpenSessionRequest(roles=roles, tenant=tenant, life_seconds=seconds, console_link=True)
        answer = owner.call("OpenSession", request)
    if not answer.web_addresses:
        raise Unavailable("the server has no web listener")
    click.echo(f"{reachable(answer.web_addresses[0])}{PAGE}#{urlencode({'link': answer.link_code})}")


def reachable(address: str) -> str:
    """A web listener's address for a browser; one that listens everywhere is reached as this machine."""
    parts = urlsplit(address)
    port = f":{parts.port}" if parts.port is not None else ""
    place = f"localhost{port}" if parts.hostname in UNSPECIFIED else parts.netloc
    return f"{parts.scheme}://{place}"


LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@click.command()
@click.argument("url")
@click.option("--name", default="", help="What to call the context.  [default: the server's host name]")
@click.option("--use", is_flag=True, help="Make it the current context too.")
@click.option("--scope", default="", help="Where commands look when they name no scope: /tenants/acme.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The authority that vouches for the server, in PEM; nothing is asked then.",
)
@click.option(
    "--fingerprint", default="", help="SHA-256 of the authority that is expected; nothing is asked then."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="File with a token, or - for standard input. Default: $FLEETPLANE_TOKEN, else it is asked for.",
)
@click.option("--account", default="", help="Log in as a person: this account, with its password.")
@click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="For --account: a file with the password, or - for standard input. Default: it is asked for.",
)
@click.option(
    "--oidc",
    is_flag=True,
    help="Log in as a person, in a browser: with the OpenID provider, or however you sign in to the console.",
)
@click.option("--timeout", type=DURATION, default=CALL_SECONDS, show_default="30s", help="For each call.")
def login(
    url: str,
    name: str,
    use: bool,
    scope: str,
    ca: Path | None,
    fingerprint: str,
    token_file: Path | None,
    account: str,
    password_file: Path | None,
    oidc: bool,
    timeout: float,
) -> None:
    """Get to know the server at URL, and keep its address, authority and a token as a context.

    The first time, the fingerprint of the server's authority is shown and has to be confirmed; afterwards a
    server that another authority vouches for is refused. The current context stays what it is, unless --use
    is given.
    """
    if oidc and (account or token_file is not None):
        raise click.UsageError("--oidc is a login of its own: leave --account and --token-file out")
    server = _server(url)
    name = name or _host_name(server)
    check_name(name)
    ca_pem = _authority(server, ca, fingerprint, timeout) if server.startswith("https:") else ""
    context = Context(name=name, server=server, ca_pem=ca_pem, scope=_scope(scope))
    if oidc:
        context = _in_browser(context, timeout)
    elif account:
        from fleetplane.client.sessions import logged_in

        context = logged_in(context, account, _password(password_file), seconds=timeout)
    else:
        context = replace(context, token=_token(token_file))
    file = ContextFile.default()
    with file.changing() as contexts:
        changed = contexts.with_context(context)
        file.write(changed.using(name) if use else changed)
    if use or changed.current == name:
        say(f"{name} is the current context: {server}")
    else:
        say(
            f"{name} is kept: {server}. The current context is still {changed.current}; "
            f"`fleetplane context use {name}`, or --context {name}, means the new one."
        )


def _server(url: str) -> str:
    """The server's address without anything else; plain text only where it stays on this machine."""
    from fleetplane.kernel.errors import InvalidArgument

    parts = _parts(url if "://" in url else f"https://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"{url!r} is no address of a server", field="url", hint="https://HOST[:PORT]")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise InvalidArgument(
            f"{url!r} has more than an address", field="url", hint="give https://HOST[:PORT] alone"
        )
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise InvalidArgument(
            f"{url} would show your token to everybody on the way", field="url", hint="use https://"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _parts(url: str) -> SplitResult:
    from urllib.parse import urlsplit

    from fleetplane.kernel.errors import InvalidArgument

    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidArgument(f"{url!r} is no address of a server: {error}", field="url") from error
    return parts


def _host_name(server: str) -> str:
    parts = _parts(server)
    return (parts.hostname or "").replace("%", "-") + (f":{parts.port}" if parts.port else "")


def _scope(scope: str) -> str:
    from fleetplane.kernel.errors import InvalidArgument

    if scope and not scope.startswith("/"):
        raise InvalidArgument(f"{scope!r} is no scope", field="scope", hint="such as /tenants/acme")
    return scope.rstrip("/") or scope


def _authority(server: str, ca: Path | None, fingerprint: str, seconds: float) -> str:
    """The authority to pin, in PEM; empty when the system's authorities vouch for the server."""
    from fleetplane.client import trust
    from fleetplane.kernel.errors import InvalidArgument, PermissionDenied

    if ca is not None:
        try:
            pem = ca.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"cannot read {ca}: {error}", field="ca") from error
        trust.check(server, pem, seconds=seconds)
        return pem
    if not fingerprint and trust.is_known(server, seconds=seconds):
        return ""
    pem = trust.presented(server, seconds=seconds)
    shown = trust.fingerprints_of(pem)[0]
    if not fingerprint:
        _confirm(server, shown)
    elif not trust.same_fingerprint(fingerprint, shown):
        raise PermissionDenied(
            f"the authority of {server} is {shown}, and not the one that was expected",
            hint="nothing was sent; ask the server's owner which one is right",
        )
    trust.check(server, pem, seconds=seconds)
    return pem


def _confirm(server: str, shown: str) -> None:
    from fleetplane.kernel.errors import PermissionDenied

    say(f"No authority that this system knows vouches for {server}. Its own authority is\n  {shown}")
    if not sys.stdin.isatty():
        raise PermissionDenied(
            f"nobody is there to confirm the authority of {server}",
            hint=f"--fingerprint {shown} says that it is the right one; --ca gives the authority itself",
        )
    click.confirm("Is that what the server's owner told you?", abort=True, err=True)


def _token(file: Path | None) -> str:
    from fleetplane import environment
    from fleetplane.client.places import TOKEN_VARIABLE, Place, given_token
    from fleetplane.kernel.errors import InvalidArgument

    if file is not None and str(file) == "-":
        token = sys.stdin.readline().strip()
    elif file is not None:
        token = given_token(Place(token_file=file))
    elif not (token := environment.current().get(TOKEN_VARIABLE, "").strip()):
        if not sys.stdin.isatty():
            raise InvalidArgument("a token is required", hint="--token-file, or FLEETPLANE_TOKEN")
        token = str(click.prompt("Token", hide_input=True, err=True)).strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument("that is no token", field="token")
    return token


def _password(file: Path | None) -> str:
    from fleetplane.client.places import Place, given_token
    from fleetplane.kernel.errors import InvalidArgument

    if file is not None and str(file) == "-":
        return sys.stdin.readline().rstrip("\n")
    if file is not None:
        return given_token(Place(token_file=file))
    if not sys.stdin.isatty():
        raise InvalidArgument("a password is required", hint="--password-file FILE, or - for standard input")
    return str(click.prompt("Password", hide_input=True, err=True))


def _in_browser(context: Context, seconds: float) -> Context:
    """A login that its user approves in a browser, here or on another machine."""
    import socket

    from fleetplane.client.sessions import approved, asked_in_browser

    asked = asked_in_browser(context, client=f"fleetplane on {socket.gethostname()}", seconds=seconds)
    say(f"Open {asked.address} and approve the login, if it shows the code {asked.user_code}. Waiting.")
    return approved(context, asked, seconds=seconds)


@click.group("context")
def context() -> None:
    """Which servers are known here, and which one is meant when nobody says.

    `local` is the server on this machine, at its owner's socket. The current context changes by `use` alone.
    """


@context.command("list")
@format_option
def list_contexts(output: Format) -> None:
    """List the contexts."""
    contexts = ContextFile.default().read()
    data = [_told(contexts, one) for one in (Context(name=LOCAL), *sorted_contexts(contexts))]
    rows = [
        [
            Cell(text="*" if one["current"] else "", style="green"),
            Cell(text=str(one["name"])),
            Cell(text=str(one["server"] or "the server on this machine")),
            Cell(text=str(one["scope"] or "-")),
        ]
        for one in data
    ]
    emit(output, data, PrintedTable(columns=("", "NAME", "SERVER", "SCOPE"), rows=rows, empty=""))


def sorted_contexts(contexts: Contexts) -> list[Context]:
    """Those of the file, by name."""
    return [one for _, one in sorted(contexts.contexts.items())]


def _told(contexts: Contexts, one: Context) -> dict[str, object]:
    return {
        "name": one.name,
        "current": one.name == contexts.current,
        "server": one.server or None,
        "scope": one.scope or None,
    }


def complete_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of contexts, for the shell."""
    contexts = ContextFile.default().read()
    return [name for name in (LOCAL, *sorted(contexts.contexts)) if name.startswith(incomplete)]


@context.command("use")
@click.argument("name", shell_complete=complete_names)
def use_context(name: str) -> None:
    """Make a context the current one."""
    file = ContextFile.default()
    with file.changing() as contexts:
        file.write(contexts.using(name))
    say(f"{name} is the current context.")


@context.command("show")
@click.argument("name", default="", shell_complete=complete_names)
@format_option
def show_context(name: str, output: Format) -> None:
    """Show a context without its token; the one that commands use now when no NAME is given."""
    from fleetplane import environment
    from fleetplane.client import local
    from fleetplane.client.places import CONTEXT_VARIABLE

    contexts = ContextFile.default().read()
    one = contexts.get(name or environment.current().get(CONTEXT_VARIABLE, "") or contexts.current)
    told = _told(contexts, one) | {"file": str(ContextFile.default().path)}
    if one.is_local:
        named = environment.current().get(local.VARIABLE, "")
        folder = Path(named) if named else local.found()
        told["dataDirectory"] = str(folder.absolute())
    elif one.ca_pem:
        from fleetplane.client.trust import fingerprints_of

        told["authority"] = fingerprints_of(one.ca_pem)
    rows = [
        [Cell(text=key.upper()), Cell(text=", ".join(value) if isinstance(value, list) else str(value))]
        for key, value in told.items()
        if value is not None
    ]
    emit(output, told, PrintedTable(columns=("FIELD", "VALUE"), rows=rows, empty=""))


@context.command("delete")
@click.argument("name", shell_complete=complete_names)
def delete_context(name: str) -> None:
    """Forget a context and its token; the current one is refused."""
    file = ContextFile.default()
    with file.changing() as contexts:
        file.write(contexts.without(name))
    say(f"{name} is forgotten. Its token still works: `fleetplane tokens revoke` ends it.")

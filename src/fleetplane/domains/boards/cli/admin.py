"""`fleetplane boards join-token|approve|credential|user`: joining, logins to boards, and users."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, cluster_of, number_of, pages
from fleetplane.kernel.errors import NotFound

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient


PASSWORD_BYTES = 18  # 24 characters of base64
role_choice = click.Choice(["viewer", "operator", "admin"])
password_option = click.option(
    "--password-file",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="A file with the password, - for standard input. Without it you are asked, or, away from a "
    "terminal, one is made up and printed.",
)


@click.group()
def user() -> None:
    """Users who log in with a name and a password. There are none until you create one."""


@user.command("add")
@click.argument("name")
@click.option("--role", type=role_choice, default="viewer", show_default=True, help="Role of the user.")
@click.option("--email", default="", help="E-mail address, which can also be used to log in.")
@password_option
@board_options
def add(name: str, role: str, email: str, password_file: Path | None, **where: Any) -> None:
    """Create a user."""
    password, made_up = _password(password_file)
    body = {"username": name, "role": role, "email": email, "password": password}
    with client(where) as server:
        server.call("POST", f"{PREFIX}/auth/register", body=body)
    _tell(password, made_up)


@user.command("passwd")
@click.argument("name")
@password_option
@board_options
def passwd(name: str, password_file: Path | None, **where: Any) -> None:
    """Set a user's password; all their logins are closed."""
    password, made_up = _password(password_file)
    with client(where) as server:
        server.call("PUT", f"{PREFIX}/users/{_find(server, name)['id']}", body={"password": password})
    _tell(password, made_up)


@user.command("set")
@click.argument("name")
@click.option("--role", type=role_choice, help="Role of the user.")
@click.option("--active/--inactive", default=None, help="Whether the user may log in.")
@board_options
def change(name: str, role: str | None, active: bool | None, **where: Any) -> None:
    """Change a user's role, or deactivate the user."""
    body = {key: value for key, value in {"role": role, "is_active": active}.items() if value is not None}
    if not body:
        raise click.UsageError("nothing to change: give --role, --active or --inactive")
    with client(where) as server:
        server.call("PUT", f"{PREFIX}/users/{_find(server, name)['id']}", body=body)


@user.command("list")
@format_option
@board_options
def list_users(output: Format, **where: Any) -> None:
    """List users."""
    with client(where) as server:
        found = list(pages(server, "/users", name="users"))
    rows = [
        [
            Cell(text=one["username"]),
            Cell(text=one["role"]),
            Cell(text=one["email"]),
            Cell(text="yes" if one["is_active"] else "no", style="" if one["is_active"] else "dim"),
            Cell(text=one["last_login"] or "never"),
        ]
        for one in found
    ]
    columns = ("NAME", "ROLE", "E-MAIL", "ACTIVE", "LOGGED IN")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no users"))


@user.command("delete")
@click.argument("name")
@board_options
def delete(name: str, **where: Any) -> None:
    """Delete a user."""
    with client(where) as server:
        server.call("DELETE", f"{PREFIX}/users/{_find(server, name)['id']}")


def _find(server: RestClient, name: str) -> dict[str, Any]:
    for one in pages(server, "/users", name="users"):
        if one["username"] == name:
            return one
    raise NotFound(f"there is no user {name!r}", hint="`fleetplane boards user list` shows them")


def _password(path: Path | None) -> tuple[str, bool]:
    """The password, and whether nobody has seen it yet."""
    if path is not None:
        with click.open_file(str(path), encoding="utf-8") as file:
            return file.read().strip("\r\n"), False
    if sys.stdin.isatty():
        return str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)), False
    return secrets.token_urlsafe(PASSWORD_BYTES), True


def _tell(password: str, made_up: bool) -> None:
    if made_up:
        click.echo(password)
        click.echo("This is the only time that the password is shown.", err=True)


FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


# Tokens.


@click.group("join-token")
def join_token() -> None:
    """Tokens with which boards join: good once, for a short time."""


@join_token.command("create")
@click.option("--name", default="", help="Name that the board must have. Default: any.")
@click.option("--role", type=click.Choice(["master", "worker"]), help="Role that the board gets.")
@click.option("--cluster", metavar="CLUSTER", help="Cluster that the board joins.")
@click.option("--replaces", metavar="BOARD", help="Board whose key was lost and is replaced by the new one.")
@click.option("--controller", is_flag=True, help="For another server instead of a board; needs --name.")
@click.option("--ttl", type=DURATION, default=3600.0, show_default="1h", help="Lifetime of the token.")
@format_option
@board_options
def create(
    name: str,
    role: str | None,
    cluster: str | None,
    replaces: str | None,
    controller: bool,
    ttl: float,
    output: Format,
    **where: Any,
) -> None:
    """Create a token and print it; it is not shown again."""
    with client(where) as server:
        body = {
            "name": name,
            "role": role,
            "cluster_id": cluster_of(server, cluster) if cluster is not None else None,
            "replaces": number_of(server, replaces) if replaces is not None else None,
            "purpose": "controller" if controller else "board",
            "ttl_seconds": ttl,
        }
        made = server.call("POST", f"{PREFIX}/join-tokens", body=body)
    if output is not Format.TABLE:
        emit(output, made, PrintedTable(columns=(), rows=(), empty=""))
        return
    click.echo(made["token"])
    words = "" if controller else " On the board:\n  fleetplane agent board join TOKEN --server HOST:9090"
    click.echo(f"Good once, until {made['expires_at']}.{words}", err=True)


@join_token.command("list")
@format_option
@board_options
def list_tokens(output: Format, **where: Any) -> None:
    """List join tokens, without their text."""
    with client(where) as server:
        found = list(pages(server, "/join-tokens"))
    rows = [
        [Cell(text=str(one[column] or "")) for column in ("id", "state", "name", "expires_at", "used_by")]
        for one in found
    ]
    columns = ("ID", "STATE", "NAME", "EXPIRES", "USED BY")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no tokens"))


@join_token.command("revoke")
@click.argument("token_id")
@board_options
def revoke(token_id: str, **where: Any) -> None:
    """Revoke a token."""
    with client(where) as server:
        server.call("DELETE", f"{PREFIX}/join-tokens/{token_id}")


# Approvals.


@click.command("approve")
@click.argument("approval", required=False)
@click.option("--reject", is_flag=True, help="Reject the key instead.")
@format_option
@board_options
def approve(approval: str | None, reject: bool, output: Format, **where: Any) -> None:
    """Let a key take a known board's place; without an argument, show which ask to.

    A board that comes back without its certificate may be the same board with a new card, or
    someone who read its serial number: compare the key with what the board itself shows.
    """
    if reject and approval is None:
        raise click.UsageError("--reject needs the name of a waiting key")
    with client(where) as server:
        if approval is not None:
            body = {"approve": not reject}
            told = server.call("POST", f"{PREFIX}/approvals/{approval}", body=body)["data"]
            click.echo(f"{told['name']}: {told['state']}", err=True)
            return
        found = list(pages(server, "/approvals"))
    rows = [
        [Cell(text=str(one[column])) for column in ("id", "name", "state", "address", "serial_number", "key")]
        for one in found
    ]
    columns = ("ID", "BOARD", "STATE", "FROM", "SERIAL", "KEY")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="nobody asks"))


# Credentials.


@click.group()
def credential() -> None:
    """How boards are logged in to over SSH. Kept sealed, and never shown again."""


@credential.command("set")
@click.argument("name", default="default")
@click.option("--user", default="pi", show_default=True, help="User to log in as.")
@click.option("--port", type=click.IntRange(1, 65_535), default=22, show_default=True, help="SSH port.")
@click.option("--key-file", type=FILE, help="File with a private key.")
@click.option("--password-file", type=FILE, help="A file with a password.")
@click.option(
    "--known-hosts",
    type=FILE,
    required=True,
    help="Host keys to accept: a known_hosts file, as `ssh-keyscan` prints it. Verify the keys.",
)
@board_options
def set_credential(
    name: str,
    user: str,
    port: int,
    key_file: Path | None,
    password_file: Path | None,
    known_hosts: Path,
    **where: Any,
) -> None:
    """Store an SSH credential, replacing one of the same name."""
    if key_file is None and password_file is None:
        raise click.UsageError("give --key-file or --password-file")
    body = {
        "username": user,
        "port": port,
        "private_key": _content(key_file),
        "password": _content(password_file).strip("\r\n"),
        "known_hosts": _content(known_hosts),
    }
    with client(where) as server:
        server.call("PUT", f"{PREFIX}/credentials/{name}", body=body)


def _content(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8") if path is not None else ""
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{path} is no text") from error


@credential.command("list")
@format_option
@board_options
def list_credentials(output: Format, **where: Any) -> None:
    """List SSH credentials by name."""
    with client(where) as server:
        found = server.call("GET", f"{PREFIX}/credentials")["credentials"]
    rows = [[Cell(text=one["name"])] for one in found]
    emit(output, found, PrintedTable(columns=("NAME",), rows=rows, empty="no credentials"))


@credential.command("delete")
@click.argument("name")
@board_options
def delete_credential(name: str, **where: Any) -> None:
    """Delete an SSH credential."""
    with client(where) as server:
        server.call("DELETE", f"{PREFIX}/credentials/{name}")

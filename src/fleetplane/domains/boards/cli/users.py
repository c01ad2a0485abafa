"""`fleetplane boards user`: people who log in with a password."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client, pages
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

"""`fleetplane instances`: groups of machines for people and scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.output import Format, format_option, working
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import Place

if TYPE_CHECKING:
    from fleetplane.domains.instances.cli.client import Operator, OperatorTarget

CALL_SECONDS = 30.0
F = TypeVar("F", bound=Callable[..., Any])
PLACE = ("context", "data_dir", "server", "token", "token_file", "ca", "timeout")
"""The options that say which server."""

timeout_option = click.option(
    "--timeout",
    type=DURATION,
    default=CALL_SECONDS,
    show_default="30s",
    help="How long to wait for an answer.",
)
tenant_option = click.option("--tenant", default="default", show_default=True, help="Tenant of the groups.")


def operator_options(command: F) -> F:
    """Which server, and as whom."""
    for option in (
        tenant_option,
        click.option(
            "--identity-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder with ca.crt, identity.key and identity.crt of an operator. Without it: as the owner "
            "of the server in --data-dir.",
        ),
        click.option("--address", metavar="HOST:PORT", help="The operator listener; needs --identity-dir."),
    ):
        command = option(command)
    return rest_options(command)


def admin_options(command: F) -> F:
    """Which server, and as whom, for what its owner and administrators do; the command takes `place`."""
    from functools import wraps

    @wraps(command)
    def located(*arguments: Any, **named: Any) -> Any:
        where = {name: named.pop(name) for name in PLACE}
        return command(*arguments, place=Place(**where), **named)

    return rest_options(located)  # type: ignore[return-value]


class InstanceVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "ca": LazyEntry(
            target="fleetplane.domains.instances.cli.ca:ca", help="Replace the certificate authority."
        ),
        "config": LazyEntry(
            target="fleetplane.domains.instances.cli.config:config",
            help="Check, show and refresh configuration.",
        ),
        "create": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:create", help="Make one instance on demand."
        ),
        "delete": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:delete", help="Delete an instance at once."
        ),
        "drain": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:drain", help="Let an instance go, and be replaced."
        ),
        "freeze": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:freeze",
            help="Stop automation: everywhere, for a tenant, for a group.",
        ),
        "freezes": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:freezes",
            help="List freezes, with who set them and why.",
        ),
        "list": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:list_instances", help="All instances."
        ),
        "nonce": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:nonce",
            help="A nonce with which an operator registers, once.",
        ),
        "open": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:open_console",
            help="A link to the console, to look at one tenant.",
        ),
        "operator-identity": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:operator_identity",
            help="A key and certificate for an operator, in a folder.",
        ),
        "rotate-nonce-key": LazyEntry(
            target="fleetplane.domains.instances.cli.ca:rotate_nonce_key", help="Sign nonces with a new key."
        ),
        "secret": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:secret", help="Keep secrets for instances' files."
        ),
        "set": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:set_group",
            help="Set and unset variables, arguments, size and type of a group.",
        ),
        "sleep": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:sleep", help="Keep a tenant's groups empty."
        ),
        "status": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:status", help="How one instance is now."
        ),
        "tenant": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:tenant",
            help="Whether a tenant sleeps, and since when it is idle.",
        ),
        "revoke": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:revoke", help="Refuse a client's certificates."
        ),
        "unfreeze": LazyEntry(
            target="fleetplane.domains.instances.cli.admin:unfreeze", help="Let automation go on."
        ),
        "wake": LazyEntry(
            target="fleetplane.domains.instances.cli.operate:wake", help="Let a tenant's groups grow again."
        ),
    }


@click.group(cls=InstanceVerbs)
def instances() -> None:
    """Groups of machines: scale, watch, drain, freeze.

    By default a command talks to the server of the current context: on this machine as its owner, elsewhere
    with the context's token. With --address and --identity-dir it talks to any server, as that operator.
    """


@instances.command()
@operator_options
@format_option
def groups(output: Format, **where: Any) -> None:
    """List a tenant's groups with desired and actual size."""
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view

    with target(**where).operator() as client:
        found = client.groups()
    emit(output, [instances_view.plain(group) for group in found], instances_view.group_table(found))


@instances.command()
@click.argument("group")
@click.argument("size", type=click.IntRange(0, 100_000))
@click.option("--wait", is_flag=True, help="Until the group has that size; 124 if not within --timeout.")
@operator_options
def scale(group: str, size: int, wait: bool, **where: Any) -> None:
    """Set how many instances GROUP should have, and leave the rest of it as it is."""
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.gen.nstance.v1 import operator_pb2

    with target(**where).operator() as client:
        before = {status.key: status for status in client.groups()}
        if group not in before:
            known = f"; there are: {', '.join(before)}" if before else ""
            raise CommandFailed(Exit.NOT_FOUND, f"no group is named {group!r}{known}")
        request = operator_pb2.UpsertGroupRequest(key=group, config=operator_pb2.GroupConfig(size=size))
        client.call("UpsertGroup", request)
        click.echo(f"{group} scaled from {before[group].size} to {size}")
        if wait:
            with working(f"waiting for {group} to have {size} instances"):
                _wait(client, group, size, where["timeout"])


@instances.command()
@click.argument("what", type=click.Choice(["all", "groups", "instances", "errors"]), default="all")
@operator_options
@format_option
@click.option("--for", "seconds", type=DURATION, help="Stop after this long. Default: run until interrupted.")
def watch(what: str, output: Format, seconds: float | None, **where: Any) -> None:
    """Follow groups, the ends of instances, and errors.

    A live table of the groups in a terminal, one line an event elsewhere. With -o json each event is
    one JSON object on its own line. Survives restarts of the server.
    """
    from fleetplane.domains.instances.cli.watch import METHODS, watch_lines, watch_live

    chosen = list(METHODS) if what == "all" else [what]
    if output is Format.TABLE and sys.stdout.isatty() and "groups" in chosen:
        watch_live(target(**where), chosen, seconds=seconds)
    else:
        watch_lines(target(**where), chosen, output, seconds=seconds)


def target(*, tenant: str, address: str | None, identity_dir: Path | None, **where: Any) -> OperatorTarget:
    """Which server is meant, and as whom."""
    from fleetplane.domains.instances.cli.client import OperatorTarget

    if address is not None and identity_dir is None:
        raise click.UsageError("--address needs --identity-dir: another server must know who asks.")
    return OperatorTarget(place=Place(**where), tenant=tenant, address=address, identity_dir=identity_dir)


def _wait(client: Operator, key: str, size: int, seconds: float) -> None:
    import grpc

    from fleetplane.cli.exits import CommandFailed, Exit

    actual = 0
    try:
        for event in client.streams("WatchGroups", seconds=seconds):
            if event.group.key == key and event.group.etag:
                actual = event.group.actual_size
                if actual == size:
                    click.echo(f"{key} has {actual} instances")
                    return
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    raise CommandFailed(Exit.TIMEOUT, f"{key} has {actual} of {size} instances after {seconds:g} s")

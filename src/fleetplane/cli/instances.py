"""`fleetplane instances`: groups of machines for people and scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane.cli.lazy import Entry, LazyGroup
from fleetplane.cli.output import Format, format_option
from fleetplane.cli.parameters import DURATION

if TYPE_CHECKING:
    from fleetplane.cli.instances_client import OperatorClient, Target

CALL_SECONDS = 30.0
F = TypeVar("F", bound=Callable[..., Any])

data_dir_option = click.option(
    "--data-dir", type=click.Path(path_type=Path), default=Path("./fleetplane-data"), show_default=True,
    envvar="FLEETPLANE_DATA_DIR", show_envvar=True, help="Of the server to talk to, on this machine.",
)  # fmt: skip
timeout_option = click.option(
    "--timeout",
    type=DURATION,
    default=CALL_SECONDS,
    show_default="30s",
    help="How long to wait for an answer.",
)
tenant_option = click.option("--tenant", default="default", show_default=True, help="Whose groups.")


def operator_options(command: F) -> F:
    """Which server, and as whom."""
    for option in (
        timeout_option,
        tenant_option,
        click.option(
            "--identity-dir", type=click.Path(path_type=Path, file_okay=False),
            help="Folder with ca.crt, identity.key and identity.crt of an operator. Without it: as the owner "
            "of the server in --data-dir.",
        ),
        click.option("--address", metavar="HOST:PORT", help="The operator listener; needs --identity-dir."),
        data_dir_option,
    ):  # fmt: skip
        command = option(command)
    return command


class Verbs(LazyGroup):
    entries: ClassVar[Mapping[str, Entry]] = {
        "ca": Entry(target="fleetplane.cli.instances_ca:ca", help="Replace the certificate authority."),
        "config": Entry(
            target="fleetplane.cli.instances_config:config", help="Check, show and refresh configuration."
        ),
        "create": Entry(
            target="fleetplane.cli.instances_operate:create", help="Make one instance on demand."
        ),
        "delete": Entry(target="fleetplane.cli.instances_operate:delete", help="Delete an instance at once."),
        "drain": Entry(
            target="fleetplane.cli.instances_admin:drain", help="Let an instance go, and be replaced."
        ),
        "freeze": Entry(
            target="fleetplane.cli.instances_admin:freeze",
            help="Stop automation: everywhere, for a tenant, for a group.",
        ),
        "freezes": Entry(
            target="fleetplane.cli.instances_admin:freezes", help="What is frozen, by whom and why."
        ),
        "list": Entry(target="fleetplane.cli.instances_admin:list_instances", help="All instances."),
        "nonce": Entry(
            target="fleetplane.cli.instances_admin:nonce",
            help="A nonce with which an operator registers, once.",
        ),
        "open": Entry(
            target="fleetplane.cli.instances_open:open_page",
            help="A link to the page that shows it all live.",
        ),
        "operator-identity": Entry(
            target="fleetplane.cli.instances_admin:operator_identity",
            help="A key and certificate for an operator, in a folder.",
        ),
        "rotate-nonce-key": Entry(
            target="fleetplane.cli.instances_ca:rotate_nonce_key", help="Sign nonces with a new key."
        ),
        "secret": Entry(
            target="fleetplane.cli.instances_admin:secret", help="Keep secrets for instances' files."
        ),
        "set": Entry(
            target="fleetplane.cli.instances_operate:set_group",
            help="Set and unset variables, arguments, size and type of a group.",
        ),
        "sleep": Entry(target="fleetplane.cli.instances_operate:sleep", help="Keep a tenant's groups empty."),
        "status": Entry(target="fleetplane.cli.instances_operate:status", help="How one instance is now."),
        "tenant": Entry(
            target="fleetplane.cli.instances_operate:tenant",
            help="Whether a tenant sleeps, and since when it is idle.",
        ),
        "revoke": Entry(
            target="fleetplane.cli.instances_admin:revoke", help="Refuse a client's certificates."
        ),
        "unfreeze": Entry(target="fleetplane.cli.instances_admin:unfreeze", help="Let automation go on."),
        "wake": Entry(
            target="fleetplane.cli.instances_operate:wake", help="Let a tenant's groups grow again."
        ),
    }


@click.group(cls=Verbs)
def instances() -> None:
    """Groups of machines: scale, watch, drain, freeze.

    By default a command talks to the server that runs on this machine in ./fleetplane-data, as its
    owner. With --address and --identity-dir it talks to any server, as that operator.
    """


@instances.command()
@operator_options
@format_option
def groups(output: Format, **where: Any) -> None:
    """All groups of a tenant: what they should be and what they are."""
    from fleetplane.cli import instances_view
    from fleetplane.cli.output import emit

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
    from fleetplane.cli.instances_watch import METHODS, watch_lines, watch_live

    chosen = list(METHODS) if what == "all" else [what]
    if output is Format.TABLE and sys.stdout.isatty() and "groups" in chosen:
        watch_live(target(**where), chosen, seconds=seconds)
    else:
        watch_lines(target(**where), chosen, output, seconds=seconds)


def target(
    *, data_dir: Path, tenant: str, address: str | None, identity_dir: Path | None, timeout: float
) -> Target:
    from fleetplane.cli.instances_client import Target

    if address is not None and identity_dir is None:
        raise click.UsageError("--address needs --identity-dir: another server must know who asks.")
    return Target(
        data_dir=data_dir, tenant=tenant, address=address, identity_dir=identity_dir, call_seconds=timeout
    )


def _wait(client: OperatorClient, key: str, size: int, seconds: float) -> None:
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

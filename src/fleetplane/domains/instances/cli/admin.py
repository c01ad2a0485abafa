"""Verbs of `fleetplane instances` for the owner of the server and administrators; `explain` of a group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleetplane.cli.output import Format, format_option
from fleetplane.cli.parameters import DURATION, owner_options
from fleetplane.client.places import Place
from fleetplane.domains.instances.cli.instances import admin_options

if TYPE_CHECKING:
    from fleetplane.domains.instances.cli.client import Calls

VIEWER = "instances.viewer"
SECRET_LIMIT_BYTES = 1024 * 1024

tenant_option = click.option("--tenant", default="default", show_default=True, help="The operator's tenant.")


@click.command("open")
@tenant_option
@click.option(
    "--for", "seconds", type=DURATION, default=3600.0, show_default="1h", help="Session time; at most 12h."
)
@owner_options
def open_console(tenant: str, seconds: float, data_dir: Path) -> None:
    """Print a link to the console that shows a tenant's groups and instances.

    The link is good once. Its session can look and do nothing else.
    """
    from fleetplane.cli import contexts as console

    click.get_current_context().invoke(
        console.open_console, roles=(VIEWER,), tenant=tenant, seconds=seconds, data_dir=data_dir, context=""
    )


@click.command()
@tenant_option
@click.option("--expiry", type=DURATION, default=10800.0, show_default="3h", help="How long it can be used.")
@click.option(
    "--output",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    default="-",
    show_default=True,
    help="Where to write it; - is stdout.",
)
@admin_options
def nonce(tenant: str, expiry: float, file: Path, place: Place) -> None:
    """A nonce with which an operator registers, once.

    Whoever holds it becomes an operator of the tenant: hand it over like a password.
    """
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    request = admin_pb2.CreateOperatorNonceRequest(tenant=tenant, expiry_seconds=expiry)
    with _admin(place) as admin:
        answer = admin.call("CreateOperatorNonce", request)
    if str(file) == "-":
        click.echo(answer.nonce_jwt)
    else:
        _write(file, answer.nonce_jwt.encode())
    click.echo(f"for an operator of {tenant}, until {answer.expires_at.ToJsonString()}", err=True)


@click.command("operator-identity")
@tenant_option
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Gets ca.crt, identity.key, identity.pub and identity.crt.",
)
@click.option("--operator-id", default="", help="Its name in the certificate; made up when not given.")
@click.option("--life", type=DURATION, help="Of the certificate, such as 8760h. Default: as configured.")
@admin_options
def operator_identity(
    tenant: str, output_dir: Path, operator_id: str, life: float | None, place: Place
) -> None:
    """A key and certificate for an operator, in a folder.

    The key is made here and does not leave the folder. It is what --identity-dir takes.
    """
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.domains.instances.cli.client import make_identity

    if (output_dir / "identity.key").exists():
        raise CommandFailed(Exit.CONFLICT, f"{output_dir} has an identity.key already; it is left alone")
    with _admin(place) as admin:
        made = make_identity(admin, tenant=tenant, operator_id=operator_id, life_seconds=life or 0.0)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in (
        ("identity.key", made.identity.key_pem),
        ("identity.pub", made.public_pem),
        ("identity.crt", made.identity.certificate_pem),
        ("ca.crt", made.identity.authority_pem),
    ):
        _write(output_dir / name, content)
    click.echo(f"{made.operator_id}, operator of {tenant}, until {made.expires_at}, in {output_dir}")
    if made.operator_address:
        hint = f"fleetplane instances groups --address {made.operator_address} --identity-dir {output_dir}"
        click.echo(f"try: {hint}", err=True)


@click.command("list")
@click.option("--tenant", default="", help="Only this tenant's.")
@click.option("--group", default="", help="Only this group's.")
@click.option("--all", "deleted_too", is_flag=True, help="Also those that are gone but not yet forgotten.")
@admin_options
@format_option
def list_instances(tenant: str, group: str, deleted_too: bool, place: Place, output: Format) -> None:
    """List instances and their states."""
    import time

    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    with _admin(place) as admin:
        answer = admin.call("ListInstances", admin_pb2.ListInstancesRequest(tenant=tenant, group=group))
    found = [entry for entry in answer.instances if deleted_too or entry.state != "deleted"]
    data = [instances_view.plain(entry) for entry in found]
    emit(output, data, instances_view.instance_table(found, time.time()))


@click.command()
@click.argument("instance")
@click.option("--within", type=DURATION, help="Delete it after this long even if nobody acknowledges.")
@click.option("--now", "at_once", is_flag=True, help="Do not wait for an acknowledgement at all.")
@admin_options
def drain(instance: str, within: float | None, at_once: bool, place: Place) -> None:
    """Let INSTANCE go, and be replaced.

    Its operator is told and has time to move the work elsewhere; then the instance is deleted.
    """
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    with _admin(place) as admin:
        known = admin.call("ListInstances", admin_pb2.ListInstancesRequest()).instances
        found = next((entry for entry in known if entry.instance_id == instance), None)
        if found is None:
            raise CommandFailed(Exit.NOT_FOUND, f"no instance is named {instance!r}")
        request = admin_pb2.DrainInstanceRequest(tenant=found.tenant, instance_id=instance)
        if at_once or within is not None:
            request.timeout_seconds = 0.0 if at_once else within or 0.0
        entry = admin.call("DrainInstance", request).instance
    click.echo(f"{instance} drains ({entry.reason}), gone by {entry.delete_at.ToJsonString()}")


scope_options = [
    click.option("--tenant", default="", help="Only this tenant; everywhere when not given."),
    click.option("--group", default="", help="Only this group of the tenant."),
]


@click.command()
@scope_options[0]
@scope_options[1]
@click.option("--reason", required=True, help="Why; shown by `explain` and `freezes`.")
@click.option("--for", "seconds", type=DURATION, help="How long the freeze lasts. Default: until lifted.")
@admin_options
def freeze(tenant: str, group: str, reason: str, seconds: float | None, place: Place) -> None:
    """Stop automation: everywhere, for a tenant, for a group.

    Nothing is created, drained, replaced or deleted there until the freeze ends. Agents go on
    reporting and getting their files.
    """
    import time

    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    request = admin_pb2.FreezeRequest(scope=_scope(tenant, group), reason=reason)
    if seconds is not None:
        request.expires_at.FromNanoseconds(time.time_ns() + round(seconds * 1e9))
    with _admin(place) as admin:
        entry = admin.call("Freeze", request)
    until = f"until {entry.expires_at.ToJsonString()}" if entry.HasField("expires_at") else "until lifted"
    click.echo(f"{entry.scope or 'everything'} is frozen {until}")


@click.command()
@scope_options[0]
@scope_options[1]
@admin_options
def unfreeze(tenant: str, group: str, place: Place) -> None:
    """Lift a freeze; a wider one still holds."""
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    scope = _scope(tenant, group)
    with _admin(place) as admin:
        if not admin.call("Lift", admin_pb2.LiftRequest(scope=scope)).lifted:
            raise CommandFailed(Exit.NOT_FOUND, f"there is no freeze of {scope or 'everything'} itself")
    click.echo(f"{scope or 'everything'} is not frozen any more")


@click.command()
@admin_options
@format_option
def freezes(place: Place, output: Format) -> None:
    """List freezes, with who set them and why."""
    import time

    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    with _admin(place) as admin:
        found = admin.call("ListFreezes", admin_pb2.ListFreezesRequest()).freezes
    data = [instances_view.plain(entry) for entry in found]
    emit(output, data, instances_view.freeze_table(found, time.time()))


@click.command()
@click.argument("client")
@click.option("--role", type=click.Choice(["agent", "operator"]), default="agent", show_default=True)
@click.option("--tenant", default="default", show_default=True)
@click.option("--reason", default="", help="Why; shown in the audit log and in the refusal.")
@click.option("--lift", is_flag=True, help="Accept its certificates again.")
@admin_options
def revoke(client: str, role: str, tenant: str, reason: str, lift: bool, place: Place) -> None:
    """Refuse the certificates of an agent or operator, and end what it has open.

    CLIENT is an instance's id, or the common name in an operator's certificate.
    """
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    with _admin(place) as admin:
        if lift:
            again = admin_pb2.ReinstateClientRequest(role=role, tenant=tenant, client=client)
            if not admin.call("ReinstateClient", again).reinstated:
                raise CommandFailed(Exit.NOT_FOUND, f"{role} {client} of {tenant} is not revoked")
            click.echo(f"{role} {client} of {tenant} is accepted again")
            return
        request = admin_pb2.RevokeClientRequest(
            role=role, tenant=tenant, client=client, reason=reason or "revoked by hand"
        )
        admin.call("RevokeClient", request)
    click.echo(f"{role} {client} of {tenant} is revoked")


@click.group()
def secret() -> None:
    """Store secrets for instances' files."""


@secret.command("put")
@click.argument("name")
@click.argument(
    "file", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True), default="-"
)
@click.option("--tenant", "tenants", multiple=True, help="Tenant whose instances may receive it; * for all.")
@admin_options
def put_secret(name: str, file: Path, tenants: tuple[str, ...], place: Place) -> None:
    """Keep what is in FILE (default: stdin) as NAME, encrypted. It cannot be read back.

    Without --tenant it stays for those it was for; one that never named any is for whoever's template
    names it in so many words.
    """
    import sys

    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    if str(file) == "-":
        content = sys.stdin.buffer.read(SECRET_LIMIT_BYTES + 1)
    else:
        with file.open("rb") as source:
            content = source.read(SECRET_LIMIT_BYTES + 1)
    with _admin(place) as admin:
        admin.call("PutSecret", admin_pb2.PutSecretRequest(name=name, content=content, tenants=tenants))
    click.echo(f"{name} is kept, {len(content)} bytes")


def explain_key(key: str, place: Place, output: Format) -> None:
    """What controllers of groups say about a key such as tenant/group; about everything when it is empty."""
    import time

    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    with _admin(place) as admin:
        found = admin.call("Explain", admin_pb2.ExplainRequest(key=key)).findings
    data = [instances_view.plain(finding) for finding in found]
    emit(output, data, instances_view.finding_table(found, time.time()))


def _admin(place: Place) -> Calls:
    from fleetplane.domains.instances.cli.client import admin_client

    return admin_client(place)


def _scope(tenant: str, group: str) -> str:
    if group and not tenant:
        raise click.UsageError("--group needs --tenant.")
    if "/" in tenant + group:
        raise click.UsageError("the names of tenants and groups have no slashes.")
    return "/".join((*(("tenant", tenant) if tenant else ()), *(("group", group) if group else ())))


def _write(path: Path, content: bytes) -> None:
    """For its owner's eyes only, from the first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)

"""Verbs of `fleetplane instances` for single instances, for whole tenants, and for settings of groups."""

from __future__ import annotations

import time
from typing import Any

import click

from fleetplane.cli.output import Format, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import Place
from fleetplane.domains.instances.cli.instances import (
    admin_options,
    operator_options,
    target,
    tenant_option,
)


class Pair(click.ParamType[tuple[str, str]]):
    """`NAME=VALUE`."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not name or not equals:
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name, text


PAIR = Pair()


@click.command()
@click.argument("group")
@click.option("--id", "instance_id", default="", help="Its id; asking twice with one makes one instance.")
@click.option("--template", default="", help="Instead of the group's.")
@click.option("--type", "instance_type", default="", help="Instead of the group's.")
@click.option("--pool", "subnet_pool", default="", help="Subnet pool, instead of the group's.")
@click.option(
    "--var", "variables", type=PAIR, multiple=True, help="NAME=VALUE, over the group's; repeatable."
)
@operator_options
@format_option
def create(
    group: str,
    instance_id: str,
    template: str,
    instance_type: str,
    subnet_pool: str,
    variables: tuple[tuple[str, str], ...],
    output: Format,
    **where: Any,
) -> None:
    """Make one instance on demand, in GROUP but beside its size.

    Prints its id. It is never replaced, and goes when it is deleted or its age is over. A tenant that
    sleeps is woken.
    """
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.nstance.v1 import operator_pb2

    config = operator_pb2.InstanceConfig(
        group=group,
        template=template,
        instance_type=instance_type,
        subnet_pool=subnet_pool,
        vars=dict(variables),
    )
    with target(**where).operator() as client:
        made = client.call(
            "CreateInstance", operator_pb2.CreateInstanceRequest(instance_id=instance_id, config=config)
        )
    if output is not Format.TABLE:
        emit(output, instances_view.plain(made), instances_view.NOTHING)
        return
    click.echo(made.instance_id)
    click.echo(f"{made.status} in {group}", err=True)


@click.command()
@click.argument("instance")
@operator_options
@format_option
def delete(instance: str, output: Format, **where: Any) -> None:
    """Delete INSTANCE at once, without a drain and without a replacement for it.

    A group that is then smaller than its size grows again: use `drain` or `scale` for its members.
    """
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.nstance.v1 import operator_pb2

    with target(**where).operator() as client:
        answer = client.call("DeleteInstance", operator_pb2.DeleteInstanceRequest(instance_id=instance))
    if answer.status == "unknown":
        raise CommandFailed(Exit.NOT_FOUND, f"no instance is named {instance!r}")
    if output is Format.TABLE:
        click.echo(f"{instance} is {answer.status}")
    else:
        emit(output, instances_view.plain(answer), instances_view.NOTHING)


@click.command()
@click.argument("instance")
@operator_options
@format_option
def status(instance: str, output: Format, **where: Any) -> None:
    """Show the status of INSTANCE as its provider reports it."""
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.nstance.v1 import operator_pb2

    with target(**where).operator() as client:
        request = operator_pb2.GetInstanceStatusRequest(instance_id=instance)
        found = client.call("GetInstanceStatus", request)
    emit(output, instances_view.plain(found), instances_view.status_table(found, time.time()))


@click.command()
@click.option("--for", "seconds", type=DURATION, help="How long to sleep. Default: until woken.")
@operator_options
@format_option
def sleep(seconds: float | None, output: Format, **where: Any) -> None:
    """Keep all groups of a tenant empty until it wakes.

    A tenant with an instance on demand is busy and stays awake: exits 6.
    """
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.nstance.v1 import operator_pb2

    request = operator_pb2.SleepTenantRequest(tenant=where["tenant"])
    if seconds is not None:
        request.wake_at.FromNanoseconds(time.time_ns() + round(seconds * 1e9))
    with target(**where).operator() as client:
        answer = client.call("SleepTenant", request)
    if answer.result == operator_pb2.SleepTenantResponse.RESULT_BUSY:
        raise CommandFailed(Exit.CONFLICT, f"{where['tenant']} is busy: it has an instance on demand")
    if output is Format.TABLE:
        click.echo(_sleeping(where["tenant"], answer))
    else:
        emit(output, instances_view.plain(answer), instances_view.NOTHING)


@click.command()
@operator_options
@format_option
def wake(output: Format, **where: Any) -> None:
    """Wake a tenant: its groups grow to their sizes again."""
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.nstance.v1 import operator_pb2

    with target(**where).operator() as client:
        answer = client.call("WakeTenant", operator_pb2.WakeTenantRequest(tenant=where["tenant"]))
    if output is not Format.TABLE:
        emit(output, instances_view.plain(answer), instances_view.NOTHING)
    elif answer.result == operator_pb2.WakeTenantResponse.RESULT_WOKE:
        click.echo(f"{where['tenant']} is awake")
    else:
        click.echo(f"{where['tenant']} was awake already")


@click.command()
@operator_options
@format_option
def tenant(output: Format, **where: Any) -> None:
    """Show whether a tenant sleeps, its listeners and since when they are idle."""
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.gen.nstance.v1 import operator_pb2

    with target(**where).operator() as client:
        request = operator_pb2.GetTenantStatusRequest(tenant=where["tenant"])
        found = client.call("GetTenantStatus", request)
    if output is Format.TABLE:
        asleep = found.status == operator_pb2.TENANT_SLEEP_STATUS_ASLEEP
        words = _sleeping(where["tenant"], found) if asleep else f"{where['tenant']} is awake"
        click.echo(words, err=bool(found.listeners))
    if output is not Format.TABLE or found.listeners:
        emit(output, instances_view.plain(found), instances_view.listener_table(found.listeners, time.time()))


def _sleeping(name: str, found: Any) -> str:
    until = f"until {found.wake_at.ToJsonString()}" if found.HasField("wake_at") else "until woken"
    return f"{name} sleeps {until}"


@click.command("set")
@click.argument("group")
@click.option("--var", "variables", type=PAIR, multiple=True, help="NAME=VALUE to set; repeatable.")
@click.option("--unset-var", "removed_variables", multiple=True, help="NAME to unset.")
@click.option(
    "--arg",
    "arguments",
    type=PAIR,
    multiple=True,
    help="NAME=VALUE for the provider, over what is configured; repeatable.",
)
@click.option("--unset-arg", "removed_arguments", multiple=True, help="NAME to unset.")
@click.option("--size", type=click.IntRange(0, 100_000), help="How many instances.")
@click.option("--type", "instance_type", help="Instance type; empty: as configured.")
@tenant_option
@admin_options
@format_option
def set_group(
    group: str,
    variables: tuple[tuple[str, str], ...],
    removed_variables: tuple[str, ...],
    arguments: tuple[tuple[str, str], ...],
    removed_arguments: tuple[str, ...],
    size: int | None,
    instance_type: str | None,
    tenant: str,
    place: Place,
    output: Format,
) -> None:
    """Change what is set of GROUP at run time, and leave the rest of it.

    Variables reach running instances with their files. Other arguments, or another type, mean other
    machines: instances are replaced one at a time.
    """
    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view
    from fleetplane.domains.instances.cli.client import admin_client
    from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2

    given = (variables, removed_variables, arguments, removed_arguments)
    if not any(given) and size is None and instance_type is None:
        raise click.UsageError("nothing to set: see --help.")
    request = admin_pb2.ChangeGroupRequest(
        tenant=tenant,
        key=group,
        vars=dict(variables),
        remove_vars=removed_variables,
        args=dict(arguments),
        remove_args=removed_arguments,
        size=size,
        instance_type=instance_type,
    )
    with admin_client(place) as admin:
        done = admin.call("ChangeGroup", request)
    emit(output, instances_view.plain(done), instances_view.settings_table(done))

"""`fleetplane gpus`: GPU health for people and scripts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.lazy import LazyGroup
from fleetplane.cli.output import Format, format_option
from fleetplane.cli.parameters import CONDITION, DURATION, ConditionTerm, address_option
from fleetplane.domains.gpus.domain import OPERATOR_PROVIDER

if TYPE_CHECKING:
    from fleetplane.cli.clients.client import DeviceClient
    from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2

CALL_SECONDS = 10.0

timeout_option = click.option(
    "--timeout",
    type=DURATION,
    default=CALL_SECONDS,
    show_default="10s",
    help="How long to wait for an answer.",
)
provider_option = click.option(
    "--provider-id", default=OPERATOR_PROVIDER, show_default=True, help="The provider to write as."
)


@click.group(cls=LazyGroup)
def gpus() -> None:
    """Read, watch and report GPU health."""


@gpus.command("list")
@address_option
@timeout_option
@format_option
def list_gpus(address: str | None, timeout: float, output: Format) -> None:
    """List GPUs and their health."""
    import time

    from fleetplane.cli.output import emit
    from fleetplane.domains.gpus.cli import view as gpu_view

    with _client(address, timeout) as client:
        listed = client.list()
    emit(output, gpu_view.list_dict(listed), gpu_view.gpu_table(listed.items, time.time()))


@gpus.command()
@click.argument("name")
@address_option
@format_option
@click.option("--expect", type=CONDITION, metavar="TYPE=STATUS", help="Exit 3 unless the condition holds.")
@click.option(
    "--wait-for",
    type=CONDITION,
    metavar="TYPE=STATUS",
    help="Wait until the condition holds; exit 124 if it does not within --timeout.",
)
@click.option(
    "--timeout",
    type=DURATION,
    help="How long to wait for an answer (10s), or for the condition (default: for ever).",
)
def get(
    name: str,
    address: str | None,
    output: Format,
    expect: ConditionTerm | None,
    wait_for: ConditionTerm | None,
    timeout: float | None,
) -> None:
    """Show a GPU."""
    from fleetplane.cli.exits import CommandFailed, Exit

    with _client(address, timeout or CALL_SECONDS) as client:
        gpu = client.get(name) if wait_for is None else _wait(client, name, wait_for, timeout)
    _show(gpu, output)
    if expect is not None and not expect.holds(gpu):
        raise CommandFailed(Exit.CONDITION_NOT_MET, f"{name}: {expect} does not hold; {expect.actual(gpu)}")


@gpus.command()
@click.argument("name", required=False)
@address_option
@timeout_option
@format_option
def conditions(name: str | None, address: str | None, timeout: float, output: Format) -> None:
    """List conditions of one GPU or all."""
    import time

    from fleetplane.cli.output import emit
    from fleetplane.domains.gpus.cli import view as gpu_view

    with _client(address, timeout) as client:
        chosen = [client.get(name)] if name is not None else list(client.list().items)
    emit(output, gpu_view.condition_dicts(chosen), gpu_view.condition_table(chosen, time.time()))


@gpus.command()
@address_option
@format_option
@click.option("--timeout", type=DURATION, help="Stop after this long. Default: run until interrupted.")
def watch(address: str | None, output: Format, timeout: float | None) -> None:
    """Follow GPU health: a live table in a terminal, one line a change elsewhere.

    With -o json each change is one JSON object on its own line, with -o yaml one document. Survives
    restarts of the server without missing or repeating a change.
    """
    from fleetplane.domains.gpus.cli.watch import watch_lines, watch_live

    with _client(address, CALL_SECONDS) as client:
        if output is Format.TABLE and sys.stdout.isatty():
            watch_live(client, seconds=timeout)
        else:
            watch_lines(client, output, seconds=timeout)


@gpus.command("set-condition")
@click.argument("name")
@click.argument("term", type=CONDITION, metavar="TYPE=STATUS")
@click.option("--reason", default="SetByOperator", show_default=True, help="One UpperCamelCase word.")
@click.option("--message", default="", help="A sentence for people.")
@provider_option
@address_option
@timeout_option
def set_condition(
    name: str,
    term: ConditionTerm,
    reason: str,
    message: str,
    provider_id: str,
    address: str | None,
    timeout: float,
) -> None:
    """Set one condition of a GPU and leave its others as they are."""
    from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2

    condition = gpu_pb2.Condition(type=term.type, status=term.status, reason=reason, message=message)
    with _client(address, timeout) as client:
        version = client.set_condition(name, condition, provider_id)
    click.echo(f"{name} {term} version {version}")


@gpus.command()
@click.argument("name")
@click.option("--uuid", default="", help="The hardware's own identifier.")
@provider_option
@address_option
@timeout_option
def register(name: str, uuid: str, provider_id: str, address: str | None, timeout: float) -> None:
    """Register a GPU. One that is there already stays as it is."""
    with _client(address, timeout) as client:
        created = client.register(name, uuid, provider_id)
    click.echo(f"{name} {'registered' if created else 'was registered already'}")


@gpus.command()
@click.argument("name")
@address_option
@timeout_option
def unregister(name: str, address: str | None, timeout: float) -> None:
    """Remove a GPU from the device API."""
    from fleetplane.cli.exits import CommandFailed, Exit

    with _client(address, timeout) as client:
        if not client.unregister(name):
            raise CommandFailed(Exit.NOT_FOUND, f"no GPU is named {name!r}")
    click.echo(f"{name} unregistered")


def _client(address: str | None, call_seconds: float) -> DeviceClient:
    from fleetplane.cli.clients.client import DeviceClient
    from fleetplane.cli.parameters import default_address

    return DeviceClient(address or default_address(), call_seconds=call_seconds)


def _wait(client: DeviceClient, name: str, term: ConditionTerm, seconds: float | None) -> gpu_pb2.Gpu:
    from fleetplane.cli.clients.client import GpuWatch, follow, name_of
    from fleetplane.cli.exits import CommandFailed, Exit

    state = GpuWatch()
    for change in follow(client, state, seconds=seconds, on_gap=lambda _reason, _delay: None):
        if name_of(change.gpu) == name and change.kind != "DELETED" and term.holds(change.gpu):
            return change.gpu
    last = state.gpus.get(name)
    actual = term.actual(last) if last is not None else "there is no such GPU"
    raise CommandFailed(Exit.TIMEOUT, f"{name}: {term} did not come true in {seconds:g} s; {actual}")


def _show(gpu: gpu_pb2.Gpu, output: Format) -> None:
    import time

    from fleetplane.cli.output import emit, emit_table
    from fleetplane.domains.gpus.cli import view as gpu_view

    data: dict[str, Any] = gpu_view.gpu_dict(gpu)
    emit(output, data, gpu_view.gpu_table([gpu], time.time()))
    if output is Format.TABLE and gpu.status.conditions:
        click.echo()
        emit_table(gpu_view.condition_table([gpu], time.time()))

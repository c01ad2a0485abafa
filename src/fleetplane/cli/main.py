"""The `fleetplane` command: the table of its verbs, and the one place where they end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import ClassVar

import click

from fleetplane.cli import streams
from fleetplane.cli.exits import Exit, explain
from fleetplane.cli.lazy import Entry, LazyGroup


class Verbs(LazyGroup):
    entries: ClassVar[Mapping[str, Entry]] = {
        "server": Entry(target="fleetplane.cli.server:server", help="Run the control plane."),
        "agent": Entry(
            target="fleetplane.cli.agent:agent", help="Run the node side: report on this machine."
        ),
        "gpus": Entry(target="fleetplane.cli.gpus:gpus", help="Read, watch and report GPU health."),
        "instances": Entry(
            target="fleetplane.cli.instances:instances",
            help="Groups of machines: scale, watch, drain, freeze.",
        ),
        "boards": Entry(
            target="fleetplane.cli.boards:boards",
            help="Raspberry-Pi-class boards: metrics, GPIO, commands, logs, provisioning.",
        ),
        "edge": Entry(target="fleetplane.cli.edge:edge", help="Daemons behind NAT, and runs across them."),
        "tokens": Entry(
            target="fleetplane.cli.tokens:tokens",
            help="Tokens of those who act on the server from elsewhere.",
        ),
        "explain": Entry(
            target="fleetplane.cli.instances_admin:explain", help="Why is something not happening?"
        ),
        "audit": Entry(target="fleetplane.cli.audit:audit", help="Read and verify the audit log."),
    }


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("fleetplane"), "-V", "--version", message="%(prog)s %(version)s")
def fleetplane() -> None:
    """One secure control plane for every machine that is not in front of you.

    Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 failure, 2 usage,
    3 condition not met, 4 not found, 5 denied, 6 conflict, 7 partial, 8 unavailable, 124 timeout.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit code."""
    streams.hold()
    code = run(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        streams.silence_stdout()
        code = Exit.BROKEN_PIPE
    except OSError as error:  # nobody was told so much that it was worth an error before
        streams.silence_stdout()
        code = code or _told(error)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every way it can end becomes an exit code here.

    click's own `main` would answer an interrupt and a broken pipe in its way before we could.
    """
    try:
        given = _texts(sys.argv[1:] if arguments is None else arguments)
        with fleetplane.make_context("fleetplane", given) as context:
            fleetplane.invoke(context)
    except click.exceptions.Exit as ended:  # --help and --version end so
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        streams.silence_stdout()
        return Exit.BROKEN_PIPE
    except Exception as error:
        return _told(error)
    return Exit.OK


def _told(error: Exception) -> int:
    failure = explain(error)
    if failure is None:
        raise error
    with suppress(OSError):  # the exit code says the rest
        click.echo(f"fleetplane: {failure.line}", err=True)
    return failure.code


def _texts(arguments: Sequence[str]) -> list[str]:
    """The arguments, all of them text: what is not could be sent to no server and printed nowhere."""
    for argument in arguments:
        if not argument.isascii():
            try:
                argument.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{argument!a} is not valid UTF-8") from None
    return list(arguments)


if __name__ == "__main__":
    main()

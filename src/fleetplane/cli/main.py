"""The `fleetplane` command: the table of its verbs, and the one place where they end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

import click

from fleetplane import __version__, environment
from fleetplane.cli import exits as streams
from fleetplane.cli.exits import Exit, explain
from fleetplane.cli.lazy import DeclaredGroup, LazyEntry


class MainVerbs(DeclaredGroup):
    kind = "verbs"
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "server": LazyEntry(target="fleetplane.cli.server:server", help="Run the control plane."),
        "demo": LazyEntry(
            target="fleetplane.cli.demo.demo:demo", help="Start a server with something of every fleet in it."
        ),
        "agent": LazyEntry(
            target="fleetplane.cli.lazy:agent", help="Run the node side: report on this machine."
        ),
        "tokens": LazyEntry(
            target="fleetplane.cli.tokens:tokens",
            help="Tokens of those who act on the server from elsewhere.",
        ),
        "revocations": LazyEntry(
            target="fleetplane.cli.tokens:revocations",
            help="Which agents know who may no longer come in.",
        ),
        "explain": LazyEntry(target="fleetplane.cli.explain:explain", help="Why is something not happening?"),
        "freeze": LazyEntry(
            target="fleetplane.cli.freeze:freeze", help="Stop controllers of a domain from acting."
        ),
        "unfreeze": LazyEntry(target="fleetplane.cli.freeze:unfreeze", help="Let controllers act again."),
        "freezes": LazyEntry(
            target="fleetplane.cli.freeze:freezes", help="List freezes, with who set them and why."
        ),
        "get": LazyEntry(
            target="fleetplane.cli.resources.get:get",
            help="Show objects of any kind.",
        ),
        "describe": LazyEntry(
            target="fleetplane.cli.resources.get:describe", help="Show everything about objects, and why."
        ),
        "watch": LazyEntry(
            target="fleetplane.cli.resources.get:watch", help="Follow objects of one kind or several."
        ),
        "events": LazyEntry(
            target="fleetplane.cli.resources.get:events", help="Show or follow what happens."
        ),
        "logs": LazyEntry(
            target="fleetplane.cli.resources.logs:logs", help="Read or follow what an object writes down."
        ),
        "top": LazyEntry(
            target="fleetplane.cli.resources.top:top", help="Show machines and GPUs with their figures."
        ),
        "whoami": LazyEntry(
            target="fleetplane.cli.resources.people:whoami", help="Show who you are, and your roles."
        ),
        "can-i": LazyEntry(
            target="fleetplane.cli.resources.people:can_i", help="Ask whether you may do something, and why."
        ),
        "mcp": LazyEntry(
            target="fleetplane.cli.resources.mcp:mcp", help="Let an assistant look at the fleet."
        ),
        "delete": LazyEntry(target="fleetplane.cli.resources.get:delete", help="Delete objects by name."),
        "plan": LazyEntry(
            target="fleetplane.cli.resources.plans:plan", help="Show what objects of files would change."
        ),
        "apply": LazyEntry(
            target="fleetplane.cli.resources.plans:apply", help="Make things as files, or a plan, say."
        ),
        "diff": LazyEntry(
            target="fleetplane.cli.resources.plans:diff", help="Compare objects of files with what is there."
        ),
        "edit": LazyEntry(
            target="fleetplane.cli.resources.plans:edit", help="Change one object in an editor."
        ),
        "export": LazyEntry(
            target="fleetplane.cli.resources.plans:export", help="Print all desired state, for `apply -f`."
        ),
        "kinds": LazyEntry(
            target="fleetplane.cli.resources.get:kinds",
            help="List the kinds of things that there are.",
        ),
        "login": LazyEntry(
            target="fleetplane.cli.contexts:login", help="Get to know a server, and keep it as a context."
        ),
        "open": LazyEntry(
            target="fleetplane.cli.contexts:open_console",
            help="Print a link that opens the console.",
        ),
        "context": LazyEntry(
            target="fleetplane.cli.contexts:context", help="Which servers are known, and which one is meant."
        ),
        "completion": LazyEntry(
            target="fleetplane.cli.completion:completion",
            help="Print what makes bash, zsh or fish complete commands.",
        ),
        "releases": LazyEntry(
            target="fleetplane.cli.upgrades.releases:releases",
            help="Versions of the agents, served to them by the server.",
        ),
        "run": LazyEntry(
            target="fleetplane.cli.running.runs:run", help="Run a command on boards or edge daemons."
        ),
        "rollout": LazyEntry(
            target="fleetplane.cli.rollouts:rollout", help="Change something on many agents in waves."
        ),
        "audit": LazyEntry(target="fleetplane.cli.audit:audit", help="Read and verify the audit log."),
        "backup": LazyEntry(
            target="fleetplane.cli.store:backup", help="Copy a server's data, checked; it may be running."
        ),
        "restore": LazyEntry(
            target="fleetplane.cli.store:restore", help="Put a backup into place, as a new lineage."
        ),
        "migrate": LazyEntry(
            target="fleetplane.cli.store:migrate", help="Move a stopped server's data to PostgreSQL."
        ),
        "servers": LazyEntry(
            target="fleetplane.cli.store:servers", help="List the servers that share a database."
        ),
        "store": LazyEntry(
            target="fleetplane.cli.store:store", help="Decide about the database of a stopped server."
        ),
    }


@click.group(cls=MainVerbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
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
        if (instruction := asked_to_complete()) is not None:
            from fleetplane.cli.completion import answer

            return answer(fleetplane, instruction)
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


def asked_to_complete() -> str | None:
    """What a shell wants to know instead of running a command, as click's completion scripts ask it."""
    return environment.current().get("_FLEETPLANE_COMPLETE")


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

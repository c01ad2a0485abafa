"""Completion in shells: the script to load, and the answers that it asks for.

The script calls `fleetplane` itself with a variable set. An answer takes as long as a command takes to start,
plus a call to the server where names are completed; a server that is away completes nothing, silently.
"""

from __future__ import annotations

import click

from fleetplane.cli.exits import Exit

VARIABLE = "_FLEETPLANE_COMPLETE"
PROGRAM = "fleetplane"
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands, options and names.

    \b
    bash:  eval "$(fleetplane completion bash)"             in ~/.bashrc
    zsh:   eval "$(fleetplane completion zsh)"              in ~/.zshrc
    fish:  fleetplane completion fish | source              in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    # click asks bash for its version to print a script; a server's image may have no bash, and every bash of
    # the last ten years will do.
    made = found(root, {}, PROGRAM, VARIABLE)
    click.echo(made.source_template % made.source_vars())


def answer(command: click.Command, instruction: str) -> int:
    """Answer a shell that asks how a line could go on."""
    from click.shell_completion import shell_complete

    try:
        return shell_complete(command, {}, PROGRAM, VARIABLE, instruction)
    except Exception:  # a shell would show it in the middle of the line
        return Exit.OK

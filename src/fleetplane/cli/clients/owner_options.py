"""Options that say which server is meant, where its owner asks; and where a stopped server's files are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The server's data directory.  [default: ./fleetplane-data]",
)
config_option = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The server's settings, as TOML: where its master key is.",
)


context_option = click.option(
    "--context",
    default="",
    metavar="NAME",
    help="A context of `fleetplane context list`.  [env var: FLEETPLANE_CONTEXT; default: the current one]",
)


def owner_flags() -> Sequence[Callable[[F], F]]:
    """Which server: by its data directory, or by context."""
    return (
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            help="Data directory of a server on this machine; the command acts as its owner.  "
            "[env var: FLEETPLANE_DATA_DIR; default: that of the one server of yours that runs]",
        ),
        context_option,
    )


def owner_options(command: F) -> F:
    """For what is asked at the server's own socket only; the command takes `data_dir`."""
    from functools import wraps

    @wraps(command)
    def located(*arguments: Any, data_dir: Path | None, context: str, **named: Any) -> Any:
        from fleetplane.client.places import Place, owner_directory

        found = owner_directory(Place(context=context, data_dir=data_dir))
        return command(*arguments, data_dir=found, **named)

    wrapped: Any = located
    for option in owner_flags():
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]

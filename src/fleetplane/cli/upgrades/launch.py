"""`fleetplane agent launch`: run an agent that its server can upgrade."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--releases",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder for downloaded versions; only this agent may use it.",
)
@click.option(
    "--release-key",
    "keys",
    multiple=True,
    required=True,
    metavar="KEY",
    help="Public key that releases must be signed with, as `fleetplane releases key` prints it; "
    "can be given often.",
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="AGENT [ARGUMENTS]...")
def launch(folder: Path, keys: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    """Run an agent, such as `edge run`, in the version that is in force.

    The version that is installed runs first. A release that a rollout orders is downloaded from the agent's
    own server, verified, and tried; if it does not say hello in its time, the former version goes on.
    """
    from fleetplane.kernel.errors import SettingsError
    from fleetplane.kernel.files import ensure_private
    from fleetplane.kernel.release_documents import parse_key
    from fleetplane.node.upgrade.folder import ReleaseFolder
    from fleetplane.node.upgrade.launch import become_launched, own_launcher

    for key in keys:
        parse_key(key)
    root = folder.absolute()
    ensure_private(root, setting="--releases")  # whoever writes to it decides what runs here
    try:
        ReleaseFolder(root).make()
    except OSError as error:
        raise SettingsError(f"--releases: {root} cannot be used: {error.strerror}") from error
    become_launched(str(root), keys, arguments, launcher=own_launcher())

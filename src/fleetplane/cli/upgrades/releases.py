"""`fleetplane releases`: versions of the agents that a server serves to them. At the server's own socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION, owner_options

if TYPE_CHECKING:
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb

CALL_SECONDS = 30.0
ADD_SECONDS = 600.0
PIECE_BYTES = 256 * 1024
MEBIBYTE = 1024 * 1024


@click.group()
def releases() -> None:
    """Versions of the agents that this server serves to them, signed with its release key.

    Nothing is upgraded by adding a release: `fleetplane rollout start agents.version DOMAIN` does that.
    """


def _call(data_dir: Path, method: str, request: Any, seconds: float = CALL_SECONDS) -> Any:
    from fleetplane.cli.clients.owner_client import OwnerClient
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2_grpc

    class ReleaseClient(OwnerClient):
        stub = releases_pb2_grpc.ReleaseAdminStub

    with ReleaseClient(data_dir, call_seconds=seconds) as owner:
        return owner.call(method, request)


@releases.command()
@click.argument(
    "wheels", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option("--floor", default="", metavar="VERSION", help="Agents that had it install nothing older.")
@click.option("--ignore-floor", is_flag=True, help="Let agents install it although it is below their floor.")
@click.option(
    "--hello",
    "hello_seconds",
    type=DURATION,
    help="The time that it has to say hello.  [default: the server's releases.hello_seconds]",
)
@click.option("--notes", default="", help="For whoever wonders what is in it.")
@owner_options
@format_option
def add(
    *,
    wheels: tuple[Path, ...],
    floor: str,
    ignore_floor: bool,
    hello_seconds: float | None,
    notes: str,
    data_dir: Path,
    output: Format,
) -> None:
    """Add a release: the wheel of fleetplane-agent, and wheels of dependencies that changed.

    What is not among them is taken from the installation of each agent.
    """
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb

    def parts() -> Iterator[pb.AddReleasePart]:
        header = pb.ReleaseHeader(
            floor=floor, ignores_floor=ignore_floor, hello_seconds=hello_seconds or 0.0, notes=notes
        )
        yield pb.AddReleasePart(header=header)
        for path in wheels:
            yield pb.AddReleasePart(file=path.name)
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield pb.AddReleasePart(content=piece)

    _show([_call(data_dir, "AddRelease", parts(), ADD_SECONDS)], output)


@releases.command("list")
@owner_options
@format_option
def list_releases(data_dir: Path, output: Format) -> None:
    """List releases, the oldest version first."""
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb

    _show(_call(data_dir, "ListReleases", pb.ListReleasesRequest()).releases, output)


@releases.command()
@click.argument("version")
@owner_options
@format_option
def show(version: str, data_dir: Path, output: Format) -> None:
    """Show the files of a release, with their digests."""
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb

    found = _call(data_dir, "GetRelease", pb.GetReleaseRequest(version=version))
    rows = [[Cell(text=one.name), Cell(text=str(one.size)), Cell(text=one.sha256)] for one in found.files]
    emit(
        output, _plain(found), PrintedTable(columns=("FILE", "BYTES", "SHA256"), rows=rows, empty="No files.")
    )


@releases.command()
@click.argument("version")
@owner_options
def delete(version: str, data_dir: Path) -> None:
    """Delete a release; refused while agents are to run it."""
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb

    _call(data_dir, "DeleteRelease", pb.DeleteReleaseRequest(version=version))
    click.echo(f"deleted release {version}")


@releases.command()
@owner_options
def key(data_dir: Path) -> None:
    """Print the public key for `fleetplane agent launch --release-key`."""
    from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2 as pb

    click.echo(_call(data_dir, "GetReleaseKey", pb.GetReleaseKeyRequest()).key)


def _show(found: Sequence[pb.ReleaseView], output: Format) -> None:
    rows = [
        [
            Cell(text=one.version),
            Cell(text=str(len(one.files))),
            Cell(text=f"{sum(file.size for file in one.files) / MEBIBYTE:.1f}"),
            Cell(text=one.floor or "-"),
            Cell(text=str(one.agents)),
            Cell(text=one.added_at),
            Cell(text=one.notes),
        ]
        for one in found
    ]
    columns = ("VERSION", "FILES", "MIB", "FLOOR", "AGENTS", "ADDED", "NOTES")
    emit(
        output, [_plain(one) for one in found], PrintedTable(columns=columns, rows=rows, empty="No releases.")
    )


def _plain(found: pb.ReleaseView) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    made: dict[str, Any] = MessageToDict(
        found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for one in made["files"]:
        one["size"] = int(one["size"])  # JSON of protobuf writes numbers of 64 bits as text
    return {**made, "agents": int(made["agents"])}

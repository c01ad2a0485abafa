"""Makes the product, in an interpreter that has this folder on its path, its own next release.

It has another version, a migration that adds a column to tables that everybody uses, and supports one level
more, from which on it writes a field of edge groups that this release does not know.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fleetplane

VERSION = "next"
fleetplane.__version__ = VERSION  # before anybody has it from there

from alembic.config import Config  # noqa: E402  # all of these after the version

from fleetplane.domains.edge.nodes.groups import EDGE_GROUP, GroupSpec  # noqa: E402
from fleetplane.kernel.resources import Kind  # noqa: E402
from fleetplane.kernel.store import Draft, schema  # noqa: E402
from fleetplane.kernel.store.migrations import runner  # noqa: E402
from fleetplane.kernel.store.servers import level  # noqa: E402

LEVEL = level.SUPPORTED.highest + 1
SEAL = "of the next release"


class SealedGroupSpec(GroupSpec, frozen=True, omit_defaults=True):
    seal: str = ""


level.SUPPORTED = level.SUPPORTED._replace(highest=LEVEL)
schema.SCHEMA_REVISION = "next"
object.__setattr__(EDGE_GROUP, "spec", SealedGroupSpec)

usual_configuration = runner.configuration
usual_put = Draft.put


def configuration(connection: Any = None) -> Config:
    config = usual_configuration(connection)
    places = (Path(runner.__file__).parent / "versions", Path(__file__).parent / "versions")
    config.set_main_option("version_locations", os.pathsep.join(map(str, places)))
    return config


def put(draft: Draft, kind: Kind[Any, Any], scope: str, name: str, *, spec: Any, **more: Any) -> Any:
    if kind is EDGE_GROUP:
        fields = {field: getattr(spec, field) for field in GroupSpec.__struct_fields__}
        spec = SealedGroupSpec(**fields, seal=SEAL if draft.level >= LEVEL else "")
    return usual_put(draft, kind, scope, name, spec=spec, **more)


runner.configuration = configuration
Draft.put = put  # type: ignore[assignment]

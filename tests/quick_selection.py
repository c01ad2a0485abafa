"""Which test modules are quick: what `make quick` runs.

Decided from the source, so that no list has to be kept: a module that starts other programs, opens listeners
or puts a whole domain together, or that imports a helper of this folder which does, is left to `make test`.
Lines are searched, because parsing every file would take longer than many of the tests.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
STARTING = re.compile(
    r"^\s*(?:import|from) (?:subprocess|multiprocessing|pty|websockets|moto)\b"
    r"|create_subprocess_(?:exec|shell)|os\.fork\(|start_server\(|create_server\(|secure_channel"
    r"|fleetplane\.domains\.\w+\.(?:server|build|core)\b|\.assembly\b|rpc\.listening",
    re.MULTILINE,
)
IMPORTED = re.compile(r"^\s*(?:import|from) ([a-z0-9_.]+)", re.MULTILINE)


@cache
def _helpers() -> dict[str, Path]:
    """Modules of the tests by the name under which tests import them."""
    return {".".join(path.relative_to(TESTS).with_suffix("").parts): path for path in TESTS.rglob("*.py")}


@cache
def is_quick(path: Path, *, via: tuple[Path, ...] = ()) -> bool:
    """Whether neither a test module nor a helper that it imports starts or opens anything."""
    text = path.read_text(encoding="utf-8")
    if STARTING.search(text):
        return False
    known = _helpers()
    return all(
        known[name] in (*via, path) or is_quick(known[name], via=(*via, path))
        for name in set(IMPORTED.findall(text)) & known.keys()
    )

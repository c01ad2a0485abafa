"""The console: one page for every resource of `/apis/v1`, made in the browser from what discovery declares.

Files of `files/console/` and nothing else; what they show comes from the resource API.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetplane.web import documents
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.ops import CONSOLE, Mount

PAGE = CONSOLE
FILES = f"{PAGE}/console"
SCRIPT = "text/javascript; charset=utf-8"
STYLE = "text/css; charset=utf-8"
MODULES = (
    "actions.mjs",
    "api.mjs",
    "chart.mjs",
    "combobox.mjs",
    "completion.mjs",
    "density.mjs",
    "detail.mjs",
    "device.mjs",
    "dialogs.mjs",
    "dom.mjs",
    "editor.mjs",
    "first.mjs",
    "following.mjs",
    "history.mjs",
    "json_lines.mjs",
    "keys.mjs",
    "list.mjs",
    "logview.mjs",
    "main.mjs",
    "model.mjs",
    "object_form.mjs",
    "observed.mjs",
    "overview.mjs",
    "pages.mjs",
    "pages/access.mjs",
    "pages/audit.mjs",
    "pages/board_programs.mjs",
    "pages/board_provisioning.mjs",
    "pages/board_sets.mjs",
    "pages/boards.mjs",
    "pages/edge.mjs",
    "pages/gpus.mjs",
    "pages/groups.mjs",
    "pages/host_editor.mjs",
    "pages/machines.mjs",
    "pages/proxies.mjs",
    "pages/proxy_traffic.mjs",
    "pages/rollouts.mjs",
    "pages/servers.mjs",
    "parts.mjs",
    "plot.mjs",
    "providers.mjs",
    "refusals.mjs",
    "saved.mjs",
    "schema_form.mjs",
    "streams.mjs",
    "yaml.mjs",
)
LIBRARIES = {"uPlot.esm.js": SCRIPT, "uPlot.min.css": STYLE}
"""Of others, brought in by the build; pages load them when they need them, and do without if they must."""


def console_mounts() -> Sequence[Mount]:
    """`/ui/` and the files of the page."""
    page = documents.file("console/console.html", "text/html; charset=utf-8", cache_seconds=0)
    by_path: dict[str, WebDocument] = {
        PAGE: page,
        f"{PAGE}/": page,
        f"{PAGE}/device": documents.file("console/device.html", "text/html; charset=utf-8", cache_seconds=0),
        f"{FILES}/console.css": documents.file("console/console.css", STYLE, cache_seconds=0),
        f"{PAGE}/live.mjs": documents.file("live.mjs", SCRIPT, cache_seconds=0),
    }
    for name in MODULES:
        by_path[f"{FILES}/{name}"] = documents.file(f"console/{name}", SCRIPT, cache_seconds=0)
    for name, content_type in LIBRARIES.items():
        by_path[f"{PAGE}/libraries/{name}"] = documents.file(
            f"libraries/{name}", content_type, cache_seconds=0
        )
    return (Mount(path=PAGE, app=Documents(by_path), summary="the console: every fleet, live"),)

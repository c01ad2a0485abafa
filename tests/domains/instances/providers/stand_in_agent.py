"""The least that can stand in for an agent: says what it was given, then waits to be ended.

Arguments: `stubborn` ignores the request to end; `brood` has a child of its own in another session;
`brief` ends at once; `loud` prints a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "loud" in sys.argv:
    print("x" * 100, flush=True)
children = []
if "brood" in sys.argv:
    children.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
told = Path(os.environ["NSTANCE_RECV_DIR"]) / "told"
told.write_text(json.dumps({"pid": os.getpid(), "children": children, "environment": dict(os.environ)}))
told.rename(told.with_suffix(".json"))
while "brief" not in sys.argv:
    signal.pause()

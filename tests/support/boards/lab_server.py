"""Run a server that looks at boards in the folder of an `SshLab`.

lab_server.py FOLDER PYTHON -m MODULE ARGUMENTS
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from fleetplane.domains.boards.provisioning.preflight import BoardPaths


def main() -> None:
    folder = Path(sys.argv[1])
    own = {
        "cgroup_controllers": str(folder / "controllers"),
        "cgroups": str(folder / "no-cgroups"),
        "cmdlines": (str(folder / "cmdline.txt"),),
        "disk": str(folder),
        "boot_id": str(folder / "boot_id"),
        "configuration": str(folder / "etc"),
        "programs": str(folder / "bin"),
        "mark": str(folder / "mark"),
    }
    defaults = BoardPaths.__init__.__kwdefaults__
    assert defaults is not None
    assert set(own) == set(defaults)
    defaults.update(own)
    _python, _module, name, *arguments = sys.argv[2:]
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""The instances domain as a process of its own: real TLS listeners, the mock provider, and many instances.

`python -m bench.instances_server READY SIZE` makes SIZE instances and then writes READY: where the
listeners are, the authority, and every instance's nonce, which its machine would have been given.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import structlog
import uvloop

from bench.servers import ROOT

sys.path.insert(0, str(ROOT / "tests"))

CREATE_SECONDS = 120.0


def _document(size: int) -> dict[str, Any]:
    from support.instances.instances_lab import document

    shard = {
        # Nobody is given up while two thousand others are still coming.
        "health_check_interval": "60s",
        "garbage_collection": {"registration_timeout": "1h", "deleted_record_retention": "1h"},
    }
    made = document(size, shard=shard)
    del made["templates"]["worker"]["files"]["kubelet.crt"]  # steady state is what is measured
    return made


async def serve(ready: Path, size: int) -> None:
    from support.instances.instances_lab import lab

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    folder = ready.with_suffix(".data")
    folder.mkdir()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with lab(folder, _document(size)) as place:
        requests = await place.created(size, seconds=CREATE_SECONDS)
        said = {
            "listeners": {"device-api": [place.addresses["registration"]]},  # where `servers` looks
            "registration": place.addresses["registration"],
            "agent": place.addresses["agent"],
            "ca": place.kernel.authority.certificate_pem.decode(),
            "nonces": {request.instance_id: request.nonce for request in requests},
        }
        staging = ready.with_suffix(".staging")
        staging.write_text(json.dumps(said))
        staging.replace(ready)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))

"""A server that dies between what a request does and its answer: run as a program, see `main`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from support.proxies.proxy_api import Api, rest_api

DIED = 9


class Crash(BaseException):
    """The end of a process, as far as a test in the same process can have it."""


def dies_after_writing(api: Api, *, kill: bool = False) -> None:
    """From now on, die as soon as something that a caller asked for is on disk."""
    transact = api.store.transact

    async def dying(change: Any, *, actor: str, **said: Any) -> Any:
        done = await transact(change, actor=actor, **said)
        if actor.startswith(("user/", "api-token/")):
            if kill:
                os._exit(DIED)
            raise Crash
        return done

    api.store.transact = dying  # type: ignore[method-assign]


async def main(folder: str, path: str, body: str, key: str) -> None:
    async with rest_api(Path(folder)) as api:
        dies_after_writing(api, kill=True)
        await api.admin.call("POST", path, json.loads(body), headers={"idempotency-key": key})


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Short-lived programs of the agent's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

RUN_SECONDS: Final = 30.0


async def run(*command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a program, which does not outlive us or its time."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return -1, f"{command[0]} did not end within {RUN_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")

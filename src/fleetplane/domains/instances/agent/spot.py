"""Whether the cloud is about to take this machine away.

A source answers one question: is there a notice? Which source fits is read from what the
firmware says of its maker, so a machine that is in no cloud never asks anything of the network.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from fleetplane.kernel.errors import Unavailable

ASK_LIMIT_SECONDS: Final = 1.0
"""Metadata services are one hop away; one that is slower will be asked again anyway."""
ANSWER_LIMIT_BYTES: Final = 64 * 1024
TOKEN_SECONDS: Final = 21_600
GOOGLE_NOTICE_SECONDS: Final = 30
_NOT_FOUND: Final = 404
_UNAUTHORIZED: Final = 401


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotNotice:
    action: str
    deadline_ns: int | None = None


class SpotSource(Protocol):
    async def notice(self) -> SpotNotice | None:
        """The notice that is out, or None. Raises Unavailable when nobody could say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataAnswer:
    status: int
    body: bytes


Ask = Callable[[str, str, Mapping[str, str]], MetadataAnswer]
"""Method, URL, headers; blocking. An argument, so that tests need no network."""


def ask_metadata(method: str, url: str, headers: Mapping[str, str]) -> MetadataAnswer:
    """Ask a metadata service directly: a proxy of the environment would answer for another machine."""
    import urllib.error  # only machines in a cloud need it, and it takes three megabytes
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, method=method, headers=dict(headers))  # noqa: S310  # constants below
    try:
        with opener.open(request, timeout=ASK_LIMIT_SECONDS) as response:
            return MetadataAnswer(status=response.status, body=response.read(ANSWER_LIMIT_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return MetadataAnswer(status=error.code, body=b"")
    except OSError as error:
        raise Unavailable(f"the metadata service does not answer: {error}") from error


class AwsSpot:
    """Amazon's: a token first, then the action and its time; 404 while there is none."""

    def __init__(self, ask: Ask = ask_metadata, *, origin: str = "http://169.254.169.254") -> None:
        self._ask = ask
        self._origin = origin
        self._token = ""

    def __repr__(self) -> str:
        return "<AwsSpot>"

    async def notice(self) -> SpotNotice | None:
        answer = await asyncio.to_thread(self._read)
        if answer.status == _NOT_FOUND:
            return None
        if answer.status != 200:
            raise Unavailable(f"the metadata service answered {answer.status}")
        try:
            said = json.loads(answer.body)
            return SpotNotice(action=str(said["action"]), deadline_ns=_nanoseconds(said.get("time")))
        except (ValueError, KeyError, TypeError, AttributeError):
            return SpotNotice(action="terminate")  # a notice that we cannot read is a notice

    def _read(self) -> MetadataAnswer:
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            granted = self._ask("PUT", f"{self._origin}/latest/api/token", lifetime)
            self._token = granted.body.decode("ascii", "replace") if granted.status == 200 else ""
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        answer = self._ask("GET", f"{self._origin}/latest/meta-data/spot/instance-action", headers)
        if answer.status == _UNAUTHORIZED:
            self._token = ""
        return answer


class GoogleSpot:
    """Google's: a flag that turns true thirty seconds before the end."""

    def __init__(
        self,
        ask: Ask = ask_metadata,
        *,
        origin: str = "http://metadata.google.internal",
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._ask = ask
        self._origin = origin
        self._now_ns = now_ns
        self._deadline_ns: int | None = None

    def __repr__(self) -> str:
        return "<GoogleSpot>"

    async def notice(self) -> SpotNotice | None:
        url = f"{self._origin}/computeMetadata/v1/instance/preempted"
        answer = await asyncio.to_thread(self._ask, "GET", url, {"Metadata-Flavor": "Google"})
        if answer.status != 200:
            raise Unavailable(f"the metadata service answered {answer.status}")
        if answer.body.strip().upper() != b"TRUE":
            self._deadline_ns = None
            return None
        if self._deadline_ns is None:
            self._deadline_ns = self._now_ns() + GOOGLE_NOTICE_SECONDS * 1_000_000_000
        return SpotNotice(action="terminate", deadline_ns=self._deadline_ns)


def detect_spot(root: Path = Path("/")) -> SpotSource | None:
    """The source that fits this machine, by the firmware's words; None in no known cloud."""
    words = " ".join(_firmware(root, name) for name in ("sys_vendor", "product_name", "bios_vendor"))
    if "amazon" in words:
        return AwsSpot()
    if "google compute engine" in words:
        return GoogleSpot()
    return None


def _firmware(root: Path, name: str) -> str:
    try:
        return (root / "sys/class/dmi/id" / name).read_text().strip().lower()
    except (OSError, ValueError):
        return ""


def _nanoseconds(text: object) -> int | None:
    if not isinstance(text, str):
        return None
    try:
        return int(datetime.fromisoformat(text).timestamp()) * 1_000_000_000
    except ValueError:
        return None

"""Objects in S3 or anything that speaks its protocol.

Conditions are the protocol's own (`If-None-Match`, `If-Match`), so that they hold across any
number of servers. Everything that decides where objects go and as whom is an argument: the
library's habit of reading the environment is overruled point by point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from fleetplane.kernel.errors import Conflict, FleetplaneError, NotFound, PermissionDenied, Unavailable
from fleetplane.kernel.objects.port import (
    OBJECT_LIMIT_BYTES,
    StoredObject,
    check_count,
    check_path,
    check_prefix,
    check_put,
    check_size,
)

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import S3Credential

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0
"""Of one request, body included: 16 MB at 5 Mbit/s."""
RETRIES = 3
RETRY_SECONDS = 60.0
"""After which a request that keeps failing is given up, whatever tries are left."""
LIST_CHUNK = 1000  # what S3 sends at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Bucket:
    bucket: str
    region: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    endpoint: str = ""
    """For other than Amazon's own, such as `https://minio.example:9000`."""
    prefix: str = ""
    """A folder of the bucket that all paths are below."""

    def credentials(self) -> S3Credential:
        return {
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "token": self.session_token,
            "expires_at": None,
        }


class StoreObjects:
    def __init__(self, bucket: S3Bucket, *, limit_bytes: int = OBJECT_LIMIT_BYTES) -> None:
        self._bucket = bucket
        self._limit_bytes = limit_bytes
        endpoint = bucket.endpoint or f"https://s3.{bucket.region}.amazonaws.com"
        self._store = S3Store(
            bucket.bucket,
            prefix=bucket.prefix or None,
            region=bucket.region,
            endpoint=endpoint,
            aws_endpoint_url_s3=endpoint,  # the environment's would go before the other
            virtual_hosted_style_request=False,
            skip_signature=False,
            s3_express=False,
            request_payer=False,
            unsigned_payload=False,
            conditional_put="etag",
            disable_bulk_delete=True,  # one object at a time, which every such storage can do
            credential_provider=bucket.credentials,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )

    def __repr__(self) -> str:
        return f"<StoreObjects s3://{self._bucket.bucket}/{self._bucket.prefix}>"

    async def get(self, path: str) -> StoredObject | None:
        check_path(path)
        try:
            with self._translated(path):
                found = await obstore.get_async(self._store, path)
                check_size(path, found.meta["size"], self._limit_bytes)
                body = bytes(await found.bytes_async())
        except NotFound:
            return None
        return StoredObject(
            body=body,
            etag=found.meta["e_tag"] or "",
            modified_at_ns=round(found.meta["last_modified"].timestamp() * 1e9),
        )

    async def put(
        self, path: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        check_put(path, body, self._limit_bytes, if_absent=if_absent, if_match=if_match)
        mode: PutMode = "overwrite"
        if if_absent:
            mode = "create"
        elif if_match is not None:
            mode = {"e_tag": if_match}
        try:
            with self._translated(path):
                # In one request: conditions do not hold for uploads in parts everywhere.
                done = await obstore.put_async(self._store, path, body, mode=mode, use_multipart=False)
        except NotFound as error:
            if if_match is None:
                raise
            raise Conflict(f"{path} was removed by someone else") from error
        return done["e_tag"] or ""

    async def delete(self, path: str) -> None:
        check_path(path)
        try:
            with self._translated(path):
                await obstore.delete_async(self._store, path)
        except NotFound:
            return

    async def list(self, prefix: str = "") -> Sequence[str]:
        folder = check_prefix(prefix)
        found: list[str] = []
        with self._translated(folder):
            async for chunk in obstore.list(self._store, folder or None, chunk_size=LIST_CHUNK):
                found.extend(meta["path"] for meta in chunk)
                check_count(prefix, len(found))
        return sorted(found)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Translate the storage's error into one of the error tree."""
        try:
            yield
        except (BaseError, FileNotFoundError, PermissionError) as error:
            raise self._meaning(path, error) from error

    def _meaning(self, path: str, error: Exception) -> FleetplaneError:
        where = f"s3://{self._bucket.bucket}"
        if isinstance(error, AlreadyExistsError):
            return Conflict(f"{path} exists already")
        if isinstance(error, PreconditionError):
            return Conflict(f"{path} was changed by someone else")
        if "NoSuchBucket" in str(error):
            return Unavailable(
                f"there is no bucket {self._bucket.bucket}", hint="check the storage's settings"
            )
        if isinstance(error, NotFoundError | FileNotFoundError):
            return NotFound(f"there is no object {path}")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
            return PermissionDenied(f"{where} refuses our credentials")
        return Unavailable(f"{where} cannot be used: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:500]

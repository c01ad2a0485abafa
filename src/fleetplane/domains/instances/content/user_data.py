"""From what a document says of user data to the text that a machine boots with.

`encoding` says how the content is written, inline or at its address; whatever it is, it is unpacked
first, and what it holds is a template. Bytes that are no text are passed on as they are.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from fleetplane.domains.instances.configuration import rendering
from fleetplane.domains.instances.configuration.schema import Userdata
from fleetplane.domains.instances.configuration.templates.template import TemplateData
from fleetplane.domains.instances.content.downloads import LIMIT_BYTES, STORAGE, Downloads
from fleetplane.domains.instances.rules.stored_paths import object_path
from fleetplane.kernel.errors import FailedPrecondition


async def user_data(
    userdata: Userdata | None,
    downloads: Downloads,
    data: TemplateData,
    *,
    nonce: str,
    report_interval_seconds: float = 0.0,
) -> bytes:
    """`data` has no nonce: it must not get into an address. The text gets it."""
    if userdata is None:
        return b""
    if userdata.is_url:
        # May be a template too, so that one address serves many groups.
        # Rendered once: what a variable holds is a name, and never a template of its own.
        address = userdata.content
        if address.startswith(STORAGE):
            address = STORAGE + object_path(address.removeprefix(STORAGE), data)
        else:
            address = rendering.render_text(address, data)
            if address.startswith(STORAGE):
                raise FailedPrecondition("user data: variables may not lead an address into the storage")
        content = await downloads.get(address)
    else:
        content = userdata.content.encode()
    plain = unpacked(content, userdata.coding)
    try:
        text = plain.decode()
    except UnicodeDecodeError:
        return plain
    own = rendering.for_user_data(data, nonce=nonce, report_interval_seconds=report_interval_seconds)
    return rendering.render_text(text, own).encode()


def unpacked(content: bytes, coding: str) -> bytes:
    if coding.startswith("base64"):
        try:
            content = base64.b64decode(b"".join(content.split()), validate=True)
        except binascii.Error as error:
            raise FailedPrecondition(f"user data is not base64, as its encoding says: {error}") from None
    return _inflated(content) if coding.endswith("gzip") else content


def _inflated(content: bytes) -> bytes:
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # a gzip header, and nothing else
    try:
        plain = stream.decompress(content, LIMIT_BYTES + 1)
    except zlib.error as error:
        raise FailedPrecondition(f"user data is not gzip, as its encoding says: {error}") from None
    if len(plain) > LIMIT_BYTES:
        raise FailedPrecondition(f"user data unpacks to more than {LIMIT_BYTES} bytes")
    if not stream.eof:
        raise FailedPrecondition("user data is not gzip, as its encoding says: it ends too early")
    return plain

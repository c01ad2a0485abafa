"""Object storage: named blobs with conditional writes, in a directory or in S3."""

from fleetplane.kernel.objects.local import LocalObjects
from fleetplane.kernel.objects.port import LIST_LIMIT, OBJECT_LIMIT_BYTES, Objects, StoredObject

__all__ = ["LIST_LIMIT", "OBJECT_LIMIT_BYTES", "LocalObjects", "Objects", "StoredObject"]

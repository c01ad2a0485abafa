"""Which machine image a name of the configuration means today.

The provider is asked with the image's filters and the answer is kept for `image_refresh_interval`.
Later answers replace it; a provider that fails, or suddenly finds nothing, does not: the last image is
better than none. Before there was any answer the document's `fallback` stands in. What is left is
unresolved, and whoever renders its name learns why.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.configuration.schema import ImageSection
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import IMAGE, ImageFound
from fleetplane.domains.instances.providers.contract import ImageQuery, ProviderCapability
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

SCOPE = ""

KEPT_LIMIT = 256
"""Images remembered, those looked up last; a document has a handful."""
RETRY_SECONDS = 30.0
"""Between look-ups that came to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundImage:
    id: str
    """Of the last look-up that found one; empty if none has."""
    problem: str
    """Of the last look-up; empty if it found one."""
    again_at: float
    """When to look again, on the monotonic clock."""


class ImageIds(Mapping[str, str]):
    """Image ids by name. Asking for one that could not be found is an error that says why."""

    def __init__(self, known: Mapping[str, str], unresolved: Mapping[str, str]) -> None:
        self._known = known
        self._unresolved = unresolved

    def __getitem__(self, name: str) -> str:
        if name in self._unresolved:
            raise FailedPrecondition(
                f"image {name!r}: {self._unresolved[name]}",
                hint="change its filters, or give it a fallback",
            )
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Images:
    def __init__(self, clock: Clock, store: Store | None = None) -> None:
        self._clock = clock
        self._store = store if store is not None and store.shared else None
        self._found: OrderedDict[ImageSection, _FoundImage] = OrderedDict()
        self.looked_up = 0

    def __repr__(self) -> str:
        return f"<Images kept={len(self._found)} looked_up={self.looked_up}>"

    def ids(self, configuration: InstancesDocument) -> ImageIds:
        """What is known now; nobody is asked."""
        known: dict[str, str] = {}
        unresolved: dict[str, str] = {}
        for name, image in configuration.images.items():
            found = self._found.get(image) or self._told(image)
            if image_id := (found.id if found is not None else "") or image.fallback:
                known[name] = image_id
            else:
                unresolved[name] = found.problem if found is not None else "it was not looked up yet"
        return ImageIds(known, unresolved)

    def _told(self, image: ImageSection) -> ImageFound | None:
        """What another server has found."""
        found = None if self._store is None else self._store.get(IMAGE, SCOPE, _name(image))
        return found.spec if found is not None else None

    async def _tell(self, image: ImageSection, found: ImageFound) -> None:
        if self._store is None or self._told(image) == found:
            return

        def change(draft: Draft) -> None:
            draft.put(IMAGE, SCOPE, _name(image), spec=found)

        key = IMAGE.key(SCOPE, _name(image))
        with suppress(FleetplaneError):  # told with the next look-up
            await self._store.transact(
                change, actor="system/instances", action="instances.image", touches=[key]
            )

    async def refresh(self, provider: GuardedProvider, configuration: InstancesDocument) -> None:
        """Look up what is not known, or not any more; never raises, the ids say what is missing."""
        for name, image in configuration.images.items():
            found = self._found.get(image)
            if found is None or self._clock.monotonic() >= found.again_at:
                known = found or self._told(image)
                await self._look_up(provider, configuration, name, image, known.id if known else "")

    async def _look_up(
        self,
        provider: GuardedProvider,
        configuration: InstancesDocument,
        name: str,
        image: ImageSection,
        before: str,
    ) -> None:
        self.looked_up += 1
        image_id, problem = "", ""
        try:
            if ProviderCapability.IMAGES not in provider.describe().capabilities:
                problem = f"the provider {provider.kind!r} cannot look images up"
            else:
                image_id = await provider.find_image(query(image))
                problem = "" if image_id else "nothing matches its filters"
        except FleetplaneError as error:
            problem = error.message
        interval = configuration.shard.image_refresh_interval_seconds if image_id else RETRY_SECONDS
        self._found[image] = _FoundImage(
            id=image_id or before, problem=problem, again_at=self._clock.monotonic() + interval
        )
        self._found.move_to_end(image)
        await self._tell(image, ImageFound(id=image_id or before, problem=problem))
        while len(self._found) > KEPT_LIMIT:
            self._found.popitem(last=False)
        if problem:
            used = image_id or before or image.fallback or ""
            log.warning("instances.image_unresolved", image=name, why=problem, used=used)
        elif image_id != before:
            log.info("instances.image", image=name, id=image_id, before=before)


def _name(image: ImageSection) -> str:
    return hashlib.sha256(msgspec.json.encode(query(image), order="deterministic")).hexdigest()


def query(image: ImageSection) -> ImageQuery:
    return ImageQuery(
        filters={one.name: one.values for one in image.filters},
        owners=image.owners,
        sort=image.sort,
        newest_first=image.order == "desc",
    )

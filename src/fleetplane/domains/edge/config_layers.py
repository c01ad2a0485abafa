"""What daemons should be configured with: layers for all, for a tenant, for one node.

    ("", "global")                    everyone
    (tenant/{tenant}, "tenant")       the tenant's nodes
    (tenant/{tenant}, "node/{id}")    one edge daemon
    ("", "node/{id}")                 one node that belongs to no tenant

Later layers win: objects are merged key by key, any other value replaces the one below. The merged
configuration is named by a digest of its own bytes, so the same content has the same version
wherever it came from. Decides what a node should have; how it gets there is others' business.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import cast

import msgspec

from fleetplane.domains.edge.kinds import Nothing, Spec, tenant_scope
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import Key, Kind, Resource
from fleetplane.kernel.store import Draft, Store

LAYER_LIMIT_BYTES = 256 * 1024
"""Of one layer; three of them merged stay well below what daemons read in one message (4 MiB)."""
DEPTH_LIMIT = 32
MERGED_LIMIT = 4096
"""Merged configurations remembered: one per tenant, and one per node that has a layer of its own."""
GLOBAL = "global"
TENANT = "tenant"

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Document = Mapping[str, Json]


class ConfigLayerSpec(Spec, frozen=True):
    content: bytes
    """Compact JSON of an object."""
    version: str
    set_by: str


ConfigLayer = Resource[ConfigLayerSpec, Nothing]
CONFIG_LAYER: Kind[ConfigLayerSpec, Nothing] = Kind("edge-config", ConfigLayerSpec, Nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A configuration as it is sent."""

    content: bytes
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer stands."""

    tenant: str = ""
    """Empty for the layer of everyone, and for nodes that belong to no tenant."""
    node_id: str = ""

    @property
    def key(self) -> Key:
        scope = tenant_scope(self.tenant) if self.tenant else ""
        if self.node_id:
            return CONFIG_LAYER.key(scope, f"node/{self.node_id}")
        return CONFIG_LAYER.key(scope, TENANT if self.tenant else GLOBAL)


def compact(document: Document) -> bytes:
    """The one way these are written: keys in order, no blanks, UTF-8."""
    try:
        text = json.dumps(
            document, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the configuration cannot be written as JSON: {error}", field="config"
        ) from error


def version_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parsed(content: bytes, *, field: str = "config") -> dict[str, Json]:
    """A layer that was sent to us: a JSON object of bounded size and depth."""
    if len(content) > LAYER_LIMIT_BYTES:
        raise InvalidArgument(
            f"a configuration has at most {LAYER_LIMIT_BYTES} bytes, not {len(content)}", field=field
        )
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgument(f"the configuration is not JSON: {error}", field=field) from error
    if not isinstance(found, dict):
        raise InvalidArgument("the configuration must be a JSON object", field=field)
    if _depth(found) > DEPTH_LIMIT:
        raise InvalidArgument(f"the configuration is nested deeper than {DEPTH_LIMIT} levels", field=field)
    return found


def _depth(value: Json) -> int:
    """How deep it goes, counted only as far as matters."""
    level: list[Json] = [value]
    for depth in range(DEPTH_LIMIT + 1):
        inner: list[Json] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        if not inner:
            return depth
        level = inner
    return DEPTH_LIMIT + 1


def merge(below: Document, above: Document) -> dict[str, Json]:
    """`above` laid over `below`; neither is changed."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            merged[key] = cast("Json", merge(under, value))
        else:
            merged[key] = value
    return merged


class ConfigLayers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._merged: OrderedDict[tuple[str, str], Merged | None] = OrderedDict()
        self._revision = -1
        """Of the layers that `_merged` was made from."""

    def __repr__(self) -> str:
        return f"<ConfigLayers {len(self._store.list(CONFIG_LAYER))}>"

    # Reading.

    def get(self, place: Place) -> ConfigLayer | None:
        _, scope, name = place.key
        return self._store.get(CONFIG_LAYER, scope, name)

    def merged(self, tenant: str, node_id: str) -> Merged | None:
        """What a node should have; None where nobody has set anything."""
        revision = self._store.kind_revision(CONFIG_LAYER)
        if revision != self._revision:
            self._merged.clear()
            self._revision = revision
        # Nodes without a layer of their own share one: ten thousand of them cost one merge.
        at = (tenant, node_id if self.get(Place(tenant=tenant, node_id=node_id)) is not None else "")
        if at not in self._merged:
            self._merged[at] = self._merge(*at)
            if len(self._merged) > MERGED_LIMIT:
                self._merged.popitem(last=False)
        return self._merged[at]

    def _merge(self, tenant: str, node_id: str) -> Merged | None:
        places = [Place()]
        if tenant:
            places.append(Place(tenant=tenant))
        if node_id:
            places.append(Place(tenant=tenant, node_id=node_id))
        layers = [layer for place in places if (layer := self.get(place)) is not None]
        if not layers:
            return None
        documents = [cast("Document", msgspec.json.decode(layer.spec.content)) for layer in layers]
        content = compact(reduce(merge, documents))
        return Merged(content=content, version=version_of(content))

    # Writing.

    async def put(self, place: Place, document: Document, *, actor: str) -> ConfigLayer:
        """Replace a whole layer."""
        content = compact(parsed(compact(document)))
        spec = ConfigLayerSpec(content=content, version=version_of(content), set_by=actor)
        _, scope, name = place.key
        done = await self._store.transact(
            lambda draft: draft.put(CONFIG_LAYER, scope, name, spec=spec),
            actor=actor, action="edge.config_set", touches=[place.key],
        )  # fmt: skip
        return done.value

    async def remove(self, place: Place, *, actor: str) -> None:
        _, scope, name = place.key

        def change(draft: Draft) -> None:
            if draft.get(CONFIG_LAYER, scope, name) is None:
                raise NotFound("no configuration was set there")
            draft.delete(CONFIG_LAYER, scope, name)

        await self._store.transact(change, actor=actor, action="edge.config_removed", touches=[place.key])

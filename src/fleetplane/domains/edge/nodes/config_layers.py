"""What daemons should be configured with: layers for all, for a tenant, for one node.

    ("", "global")                    everyone
    (tenant/{tenant}, "tenant")       the tenant's nodes
    (tenant/{tenant}, "node/{id}")    one edge daemon
    ("", "node/{id}")                 one node that belongs to no tenant

Later layers win: objects are merged key by key, any other value replaces the one below. The merged
configuration is named by a digest of its own bytes, so the same content has the same version
wherever it came from. Decides what a node should have; how it gets there is others' business.

While a rollout or a policy holds a tenant, its nodes have the layers of everyone and of the tenant as the
version has them at which each is held; a node's own layer is laid over that at once.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import cast

import msgspec

from fleetplane.domains.edge.kinds import EdgeSpec, tenant_scope
from fleetplane.fleet.masking import masked, masked_values, with_known_secrets
from fleetplane.fleet.rollouts.holds import HoldReader
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.documents import check_document

LAYER_LIMIT_BYTES = 256 * 1024
"""Of one layer; three of them merged stay well below what daemons read in one message (4 MiB)."""
MERGED_LIMIT = 4096
"""Merged configurations remembered: one per tenant, and one per node that has a layer of its own."""
SUBJECT = "edge.config"
"""Of rollouts: the layers of everyone and of a tenant, for the daemons of the tenant."""
GLOBAL = "global"
TENANT = "tenant"

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Document = Mapping[str, Json]


class ConfigLayerSpec(EdgeSpec, frozen=True):
    content: bytes
    """Compact JSON of an object."""
    version: str
    set_by: str


ConfigLayer = Resource[ConfigLayerSpec, Nothing]
CONFIG_LAYER: Kind[ConfigLayerSpec, Nothing] = Kind("edge-config", ConfigLayerSpec, Nothing, is_secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedConfig:
    """A configuration as it is sent."""

    content: bytes
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
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
    check_document(found, field=field)
    return found


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


LayerAt = Callable[[LayerPlace], ConfigLayer | None]


def layers_of(source: Store | Draft) -> LayerAt:
    """The layers as they are stored, or as a draft has them."""
    return lambda place: source.get(CONFIG_LAYER, place.key.scope, place.key.name)


def shared(layer: LayerAt, tenant: str) -> bytes:
    """The layers of everyone and of a tenant, merged: what is rolled out to the tenant's daemons."""
    return compact(reduce(merge, _documents(layer, [LayerPlace(), LayerPlace(tenant=tenant)]), {}))


def _documents(layer: LayerAt, places: Iterable[LayerPlace]) -> list[Document]:
    found = (layer(place) for place in places)
    return [cast("Document", msgspec.json.decode(one.spec.content)) for one in found if one is not None]


class ConfigLayers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.holds = HoldReader(store, SUBJECT)
        self._merged: OrderedDict[tuple[str, str, str], MergedConfig | None] = OrderedDict()
        self._revisions = (-1, -1)
        """Of the layers and holds that `_merged` was made from."""

    def __repr__(self) -> str:
        return f"<ConfigLayers {len(self._store.list(CONFIG_LAYER))}>"

    # Reading.

    def get(self, place: LayerPlace) -> ConfigLayer | None:
        _, scope, name = place.key
        return self._store.get(CONFIG_LAYER, scope, name)

    def merged(self, tenant: str, node_id: str) -> MergedConfig | None:
        """What a node should have; None where nobody has set anything.

        Without a node: what the layers come to now, whether or not anybody has it yet.
        """
        version = self.holds.wanted(tenant_scope(tenant), node_id) if tenant and node_id else ""
        return self.at_version(tenant, node_id, version)

    def at_version(self, tenant: str, node_id: str, version: str) -> MergedConfig | None:
        """What a node would have at a version of its tenant's layers; at the newest if that is empty."""
        revisions = self._store.kind_revision(CONFIG_LAYER), self.holds.revision
        if revisions != self._revisions:
            self._merged.clear()
            self._revisions = revisions
        # Nodes without a layer of their own share one: ten thousand of them cost one merge.
        own = node_id if self.get(LayerPlace(tenant=tenant, node_id=node_id)) is not None else ""
        at = (tenant, own, version)
        if at not in self._merged:
            self._merged[at] = self._merge(*at)
            if len(self._merged) > MERGED_LIMIT:
                self._merged.popitem(last=False)
        return self._merged[at]

    def _merge(self, tenant: str, node_id: str, version: str) -> MergedConfig | None:
        places = [LayerPlace(tenant=tenant, node_id=node_id)] if node_id else []
        base = self.holds.content(tenant_scope(tenant), version) if version else None
        if base is not None:
            documents = [cast("Document", msgspec.json.decode(base)), *_documents(self.get, places)]
        else:
            under = [LayerPlace(), LayerPlace(tenant=tenant)] if tenant else [LayerPlace()]
            documents = _documents(self.get, [*under, *places])
        if not documents:
            return None
        content = compact(reduce(merge, documents))
        return MergedConfig(content=content, version=version_of(content))

    # Writing.

    async def put(self, place: LayerPlace, document: Document, *, actor: str) -> ConfigLayer:
        """Replace a whole layer."""
        done = await self._store.transact(
            lambda draft: put_layer(draft, place, document, actor=actor),
            actor=actor,
            action="edge.config_set",
            touches=[place.key],
        )
        return done.value

    async def remove(self, place: LayerPlace, *, actor: str) -> None:
        await self._store.transact(
            lambda draft: remove_layer(draft, place),
            actor=actor,
            action="edge.config_removed",
            touches=[place.key],
        )


# The changes themselves, as functions of a draft.


def put_layer(draft: Draft, place: LayerPlace, document: Document, *, actor: str) -> ConfigLayer:
    """Replace a whole layer; what was shown masked stays what it is.

    Raises `InvalidArgument` for one that no daemon could take.
    """
    check_document(document, field="config")
    _, scope, name = place.key
    stored = draft.get(CONFIG_LAYER, scope, name)
    given: Document = parsed(compact(document))
    if stored is not None:
        given = with_known_secrets(given, msgspec.json.decode(stored.spec.content))
    for problem in masked_values(given, "config"):
        raise InvalidArgument(
            f"{problem.field} is masked, and there is no value that it stands for",
            field=problem.field,
            hint="give the value itself",
        )
    content = compact(given)
    if stored is not None and stored.spec.content == content:
        return stored  # who sets the same again does not become the one who set it
    spec = ConfigLayerSpec(content=content, version=version_of(content), set_by=actor)
    return draft.put(CONFIG_LAYER, scope, name, spec=spec)


def shown(content: bytes) -> dict[str, Json]:
    """A layer, or what layers come to, for whoever may not change it: with secrets masked."""
    found: dict[str, Json] = masked(msgspec.json.decode(content))
    return found


def remove_layer(draft: Draft, place: LayerPlace) -> None:
    """Delete a layer; those below it show through again."""
    _, scope, name = place.key
    if draft.get(CONFIG_LAYER, scope, name) is None:
        raise NotFound("no configuration was set there")
    draft.delete(CONFIG_LAYER, scope, name)

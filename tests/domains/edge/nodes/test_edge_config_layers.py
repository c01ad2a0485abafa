"""Layers of configuration: what wins, what it is called, what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.edge.nodes.config_layers import (
    CONFIG_LAYER,
    LAYER_LIMIT_BYTES,
    ConfigLayers,
    Document,
    LayerPlace,
    compact,
    merge,
    parsed,
)
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.values.documents import DEPTH_LIMIT
from fleetplane.sim.clock import VirtualClock

NODE = "11111111-2222-4333-8444-555555555555"
ACME = LayerPlace(tenant="acme")
MINE = LayerPlace(tenant="acme", node_id=NODE)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[ConfigLayers]:
    settings = StoreSettings(path=folder / "state.db")
    async with Store.open(settings, kinds=(CONFIG_LAYER, *ROLLOUT_KINDS), clock=VirtualClock()) as store:
        yield ConfigLayers(store)


def test_objects_are_merged_and_all_else_is_replaced() -> None:
    below: Document = {"a": {"x": 1, "y": {"deep": True}}, "list": [1, 2], "gone": {"was": "object"}}
    above: Document = {"a": {"y": {"more": 2}}, "list": [3], "gone": None}
    assert merge(below, above) == {
        "a": {"x": 1, "y": {"deep": True, "more": 2}},
        "list": [3],
        "gone": None,
    }
    assert below["a"] == {"x": 1, "y": {"deep": True}}


@given(DOCUMENTS, DOCUMENTS)
def test_plain_values_of_the_upper_layer_stand_and_no_key_is_lost(one: Document, two: Document) -> None:
    merged = merge(one, two)
    assert set(merged) == {*one, *two}
    for key, value in two.items():
        if not isinstance(value, dict):
            assert merged[key] == value
    assert merge(merged, merged) == merged
    assert merge({}, merged) == merged == merge(merged, {})


async def test_later_layers_win_and_the_version_is_the_digest_of_what_is_sent(tmp_path: Path) -> None:
    async with opened(tmp_path) as layers:
        assert layers.merged("acme", NODE) is None
        await layers.put(LayerPlace(), {"level": "global", "only": {"global": 1}}, actor="boss")
        await layers.put(ACME, {"level": "tenant", "only": {"tenant": "é"}}, actor="boss")
        for_all = layers.merged("acme", NODE)
        await layers.put(MINE, {"level": "node"}, actor="boss")

        mine, others, strangers = (
            layers.merged("acme", NODE),
            layers.merged("acme", "other"),
            layers.merged("else", "other"),
        )
        assert mine is not None
        assert others is not None
        assert strangers is not None
        assert json.loads(mine.content) == {"level": "node", "only": {"global": 1, "tenant": "é"}}
        assert mine.version == hashlib.sha256(mine.content).hexdigest()
        assert mine.content == '{"level":"node","only":{"global":1,"tenant":"é"}}'.encode()
        assert others == for_all
        assert json.loads(strangers.content) == {"level": "global", "only": {"global": 1}}


async def test_nodes_without_a_layer_of_their_own_share_one_configuration(tmp_path: Path) -> None:
    async with opened(tmp_path) as layers:
        await layers.put(ACME, {"a": 1}, actor="boss")
        assert layers.merged("acme", "one") is layers.merged("acme", "two")


async def test_a_removed_layer_no_longer_counts_and_cannot_be_removed_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as layers:
        await layers.put(ACME, {"a": 1}, actor="boss")
        await layers.put(MINE, {"a": 2}, actor="boss")
        await layers.remove(MINE, actor="boss")
        found = layers.merged("acme", NODE)
        assert found is not None
        assert found.content == b'{"a":1}'
        with pytest.raises(NotFound):
            await layers.remove(MINE, actor="boss")


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b'{"a": NaN}',
        b"x" * (LAYER_LIMIT_BYTES + 1),
        b'{"a":' * (DEPTH_LIMIT + 1) + b"1" + b"}" * (DEPTH_LIMIT + 1),
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_bounded_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parsed(content)


def test_what_cannot_be_json_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        compact({"a": float("nan")})
    with pytest.raises(InvalidArgument):
        compact({"a": b"bytes"})  # type: ignore[dict-item]

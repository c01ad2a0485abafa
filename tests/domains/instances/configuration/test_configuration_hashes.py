"""Every expected digest was made by Go's encoding/json over structs of the same shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.instances.configuration_samples import configuration

from fleetplane.domains.instances.configuration import go_json as gojson
from fleetplane.domains.instances.configuration import hashes, merge
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.kinds import GroupOverride

WORKER: dict[str, Any] = {
    "kind": "knd",
    "arch": "arm64",
    "instance_type": "t4g.small",
    "subnet_pool": "workers",
    "vars": {"b": "2", "a": "é\u2028"},
    "args": {
        "ImageId": "ami-1 <&>",
        "Disk": {"Size": 50, "Type": "gp3"},
        "Ratio": 0.5,
        "Big": 1e21,
        "Tags": ["a", True, None],
    },
    "userdata": {"content": "#!/bin/sh\n"},
    "files": {
        "node.env": {"kind": "env", "template": {"B": "{{ .Instance.ID }}", "A": "x"}},
        "node.crt": {
            "kind": "certificate",
            "template": "node",
            "key": {"source": "agent", "name": "node.pub"},
        },
        "peer.json": {"kind": "secret", "source": "peer"},
    },
}


def group(template: dict[str, Any], override: GroupOverride | None = None, **stated: Any) -> EffectiveGroup:
    config = configuration(
        shard__subnet_pools={"workers": ["subnet-1"]},
        certificates={"node": {"kind": "client"}},
        templates__worker=template,
        groups={"default": {} if override else {"apps": {"template": "worker", **stated}}},
    )
    made = merge.effective(config, "default", "apps", override)
    assert made is not None
    return made


def test_hashes_are_those_that_go_takes() -> None:
    full = group(WORKER)
    empty = group({"kind": "knd", "arch": "amd64"})

    assert hashes.runtime_hash(full) == (
        "sha256:8560154ff7637f78a906c60332221a8e12ce7e9ca2256dea027ed69e8d9ef490"
    )
    assert hashes.runtime_hash(empty) == (
        "sha256:e5ae13dd1e88c12b792290cbb21fee11f01e4237521f8869d826a1a7d3b3d30d"
    )
    assert hashes.infra_hash(full) == (
        "sha256:1efaa0dee3cf16b1a6b3563f68594d9e7eb06b0b59fc96b177194e9f5e860a44"
    )
    assert hashes.infra_hash(empty) == (
        "sha256:92c4e034965c492b591fbf74b27ca13931498e5f9f17f809bb9a2fb3a7fc1783"
    )


def test_etags_are_those_that_go_takes() -> None:
    static = group({**WORKER, "vars": {}}, size=3, subnet_pool="workers", vars={"a": "<1>"})
    dynamic = group({**WORKER, "tenants": ["*"]}, GroupOverride(template="worker"))

    assert hashes.group_etag(static) == "364fd0c76d3eb3dd56e0e55c3f4e04b8"
    assert hashes.group_etag(dynamic) == "4daa8d8b20c3d5b0eb628a1ba8b108d3"


@pytest.mark.parametrize(
    ("change", "moves_runtime", "moves_infra"),
    [
        ({"vars": {"a": "1"}}, True, False),
        ({"files": {}}, True, False),
        ({"args": {}}, False, True),
        ({"instance_type": "t4g.large"}, False, True),
        ({"subnet_pool": "other"}, False, True),
        ({"userdata": None}, False, True),
        ({"prefix": "abc"}, False, True),
        ({"arch": "amd64"}, False, True),
        ({"size": 9, "load_balancers": ("www",), "drain_timeout_seconds": 1.0}, False, False),
    ],
)
def test_each_fact_moves_the_hash_it_belongs_to(
    change: dict[str, Any], moves_runtime: bool, moves_infra: bool
) -> None:
    before = group(WORKER)
    after = replace(before, **change)

    assert (hashes.runtime_hash(after) != hashes.runtime_hash(before)) is moves_runtime
    assert (hashes.infra_hash(after) != hashes.infra_hash(before)) is moves_infra


def test_what_was_left_out_of_user_data_is_not_the_same_as_its_default_written_down() -> None:
    implicit = group(WORKER)
    explicit = group({**WORKER, "userdata": {"source": "inline", "content": "#!/bin/sh\n"}})

    assert hashes.infra_hash(implicit) != hashes.infra_hash(explicit)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('<a href="x">&\u2028\x01\\\n', r'"\u003ca href=\"x\"\u003e\u0026\u2028\u0001\\\n"'),
        (
            [0.1, 100, 1e20, 1e21, 1e-6, 1e-7, -0.0, 5e-324, 2**53 + 1],
            "[0.1,100,100000000000000000000,1e+21,0.000001,1e-7,-0,5e-324,9007199254740992]",
        ),
        ({"b": None, "a": True, "B": []}, '{"B":[],"a":true,"b":null}'),
    ],
)
def test_json_is_written_as_go_writes_it(value: object, text: str) -> None:
    assert gojson.dumps(value) == text


def test_indented_json_is_written_as_go_writes_it() -> None:
    assert gojson.dumps({"b": [1, {}], "a": {"c": []}}, indent=2) == (
        '{\n  "a": {\n    "c": []\n  },\n  "b": [\n    1,\n    {}\n  ]\n}'
    )


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False)))
def test_the_order_in_which_keys_were_written_does_not_matter(members: dict[str, object]) -> None:
    assert gojson.dumps(members) == gojson.dumps(dict(reversed(members.items())))

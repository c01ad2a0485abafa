"""Versions in their order, wheels by their names, keys as people copy them."""

from __future__ import annotations

import pytest

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.release_documents import (
    UpgradeOrder,
    WheelPlatform,
    choose,
    decode,
    encode,
    fits,
    is_older,
    key_text,
    parse_key,
    parse_wheel,
    version_key,
)

HERE = WheelPlatform(python=(3, 11), machine="x86_64", glibc=(2, 36))
MUSL = WheelPlatform(python=(3, 11), machine="x86_64")


def test_versions_are_ordered_as_python_orders_them() -> None:
    grown = ["0.9", "1.0.dev3", "1.0a1", "1.0a2", "1.0b1", "1.0rc1", "1.0", "1.0.post1", "1.0.1", "1.10", "2"]

    shuffled = [*grown[::2], *grown[1::2]]
    assert sorted(shuffled, key=version_key) == grown
    assert not is_older("1.0", "1")
    assert not is_older("1", "1.0.0")


@pytest.mark.parametrize("text", ["", "1.", "v1", "1.2.3.4.5", "1/2", "../1", "1.0+local", "1" * 70, "١"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a version"):
        version_key(text)


@pytest.mark.parametrize(
    ("tags", "machine", "usable"),
    [
        ("py3-none-any", HERE, True),
        ("py2.py3-none-any", HERE, True),
        ("py2-none-any", HERE, False),
        ("py312-none-any", HERE, False),
        ("cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", HERE, True),
        ("cp312-cp312-manylinux_2_17_x86_64", HERE, False),
        ("cp39-abi3-manylinux_2_34_x86_64", HERE, True),
        ("cp312-abi3-manylinux_2_34_x86_64", HERE, False),
        ("cp39-abi3-manylinux_2_39_x86_64", HERE, False),  # needs a newer C library
        ("cp311-cp311-manylinux_2_17_aarch64", HERE, False),
        ("cp311-cp311-musllinux_1_2_x86_64", HERE, False),
        ("cp311-cp311-musllinux_1_2_x86_64", MUSL, True),
        ("cp311-cp311-manylinux_2_17_x86_64", MUSL, False),
        ("cp311-cp311-macosx_11_0_arm64", HERE, False),
        ("cp311-cp311-win_amd64", HERE, False),
        ("cp311-cp311t-linux_x86_64", HERE, False),
    ],
)
def test_a_wheel_is_used_where_its_name_says(tags: str, machine: WheelPlatform, usable: bool) -> None:
    assert fits(parse_wheel(f"thing-1.0-{tags}.whl"), machine) is usable


@pytest.mark.parametrize(
    "name",
    ["thing-1.0.tar.gz", "thing-1.0.zip", "../thing-1.0-py3-none-any.whl", "thing-1.0-py3-none-any.whl/x",
     "thing-1.0-py3-none.whl", "/thing-1.0-py3-none-any.whl", "", "a" * 300 + "-1.0-py3-none-any.whl"],
)  # fmt: skip
def test_only_names_of_wheels_are_taken(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not the name of a wheel"):
        parse_wheel(name)


def test_one_wheel_of_each_distribution_is_chosen_the_built_one_before_the_plain_one() -> None:
    agent, plain = "fleetplane_agent-1.0-py3-none-any.whl", "thing-2.0-py3-none-any.whl"
    built, other = "thing-2.0-cp311-cp311-linux_x86_64.whl", "thing-2.0-cp311-cp311-linux_aarch64.whl"

    assert [one.file for one in choose([plain, other, built, agent], HERE)] == [agent, built]
    with pytest.raises(InvalidArgument, match=r"no wheel of thing for python-3\.11 linux-x86_64-glibc-2\.36"):
        choose([agent, other], HERE)
    with pytest.raises(InvalidArgument, match="no wheel of fleetplane_agent"):
        choose([plain], HERE)


def test_a_key_is_read_as_it_was_printed_and_nothing_else_is() -> None:
    assert parse_key(key_text(bytes(range(32)))) == bytes(range(32))
    for text in ("", "ed25519:", "ed25519:AAAA", key_text(bytes(32))[8:], "rsa:" + key_text(bytes(32))[8:]):
        with pytest.raises(InvalidArgument, match="is not a release key"):
            parse_key(text)


@pytest.mark.parametrize("attempt", [-1, 2**63, 2**200])
def test_an_order_whose_number_no_report_can_carry_is_refused(attempt: int) -> None:
    order = UpgradeOrder(agent="a", nonce="", version="1.0", manifest="", attempt=7, seconds=1.0)
    assert decode(encode(order), UpgradeOrder) == order
    with pytest.raises(InvalidArgument, match="attempt"):
        decode(encode(order).replace(b'"attempt":7', b'"attempt":%d' % attempt), UpgradeOrder)

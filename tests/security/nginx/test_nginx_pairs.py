"""Tables of values in a text to be tested have names that anybody may choose: they stay names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.domains.proxies.nginx.reading import foreign_fault, read, text_to_test

NAMES = (
    "a 1; } include /etc/passwd; map $c $d { b",
    "} load_module /tmp/x.so; #",
    'a"; } user root; "',
    'a\\\\\\"; } user root; #',
    "# nothing",
    "${x} ; } user root;",
)


@pytest.mark.parametrize("block", ["map $a $b", "geo $b", "split_clients $a $b", "types"])
@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_pair_stays_one_word(tmp_path: Path, block: str, name: str) -> None:
    spelled = name.replace("\\", "\\\\").replace('"', '\\"')
    content = f'events {{}} http {{ {block} {{ "{spelled}" 1; }} }}'
    if foreign_fault(content, PathPolicy(roots=())):
        return  # refused is as good
    written = text_to_test(content, tmp_path)
    (http,) = [node for node in read(written) if node.name == "http"]
    pairs = [node for table in http.body if table.name == block.split(maxsplit=1)[0] for node in table.body]  # type: ignore[union-attr]
    assert [(pair.name, pair.arguments) for pair in pairs] == [(name, ("1",))]
    assert "load_module" not in {node.name for node in read(written)}

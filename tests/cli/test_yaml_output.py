"""What commands print as YAML."""

from __future__ import annotations

import pytest
import yaml

from fleetplane.cli.output import yaml_text
from fleetplane.cli.resources.show import safe_yaml


@pytest.mark.parametrize(
    "text", ["12e45678", "1E5", "-1e5", "+.5e3", "1.e+3", "12345678", "0x1f", "1_000", "no"]
)
def test_an_id_that_looks_like_a_number_is_in_quotes_for_every_reader(text: str) -> None:
    for printed in (yaml_text({"id": text}), safe_yaml({"id": text})):
        assert printed == f"id: '{text}'\n"
        assert yaml.safe_load(printed) == {"id": text}


def test_numbers_and_other_text_are_as_they_were() -> None:
    data = {"size": 1e5, "count": 3, "ids": ["e12", "12e", "12e4x", "1e5-2"], "none": None}
    assert yaml_text(data) == yaml.safe_dump(data, sort_keys=False)
    assert safe_yaml({"name": "a\x1bb"}) == 'name: "a\\eb"\n'

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from configuration_samples import EXAMPLE

from fleetplane.cli.instances_config import config


def test_a_valid_file_is_summed_up_in_one_line() -> None:
    done = CliRunner().invoke(config, ["validate", str(EXAMPLE)])

    assert done.exit_code == 0
    assert done.stdout == (
        f"{EXAMPLE}: valid: cluster example-cluster, shard us-west-2a, 2 templates, 3 groups, 3 instances\n"
    )


def test_every_problem_is_a_line_that_an_editor_can_jump_to(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonc"
    file.write_text(EXAMPLE.read_text().replace('"504h"', '"21d"').replace('"size": 1', '"size": "one"'))

    done = CliRunner().invoke(config, ["validate", str(file)])

    first, second = done.stdout.splitlines()
    assert done.exit_code == 3
    assert first.startswith(f"{file}:48:33: shard.expiry.eligible_age: '21d' is no duration")
    assert second.endswith("groups.default.main.size: must be a whole number, not a string")


def test_a_document_can_come_from_a_pipe() -> None:
    done = CliRunner().invoke(config, ["validate", "-"], input=EXAMPLE.read_bytes())

    assert done.exit_code == 0
    assert done.stdout.startswith("<stdin>: valid")


def test_a_file_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(config, ["validate", str(tmp_path / "none.jsonc")])

    assert done.exit_code == 2

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from support.instances.configuration_samples import EXAMPLE, document

from fleetplane.domains.instances.cli.config import config


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


def test_warnings_are_shown_and_the_document_is_good_all_the_same(tmp_path: Path) -> None:
    done = CliRunner().invoke(config, ["validate", str(EXAMPLE)])
    assert done.exit_code == 0
    assert f"warning: {EXAMPLE}:" in done.stderr
    assert "cluster.storage: has no effect" in done.stderr
    assert "warning" not in done.stdout


def test_a_provider_that_is_not_installed_is_refused_unless_the_settings_name_another(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "tmux.jsonc"
    elsewhere.write_text(json.dumps(document(shard__infra__provider="tmux")))
    refused = CliRunner().invoke(config, ["validate", str(elsewhere)])
    assert refused.exit_code == 3
    assert "shard.infra.provider: must be one of" in refused.stdout
    assert CliRunner().invoke(config, ["validate", str(elsewhere), "--provider", "local"]).exit_code == 0

"""What several servers need lies where all of them reach it; or none of them starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane import settings as configuration
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.objects import LocalObjects
from fleetplane.server import assembly
from fleetplane.settings import Settings

SHARED = '[store]\nurl = "postgresql://db.example/fleetplane"\n'


def given(folder: Path, text: str, *only: str) -> Settings:
    config = folder / "fleetplane.toml"
    config.touch(mode=0o600)
    config.write_text(f'data_dir = "{folder}/data"\nonly = {list(only)}\n{text}'.replace("'", '"'))
    return configuration.load(config=config, flags={})


def test_a_server_that_shares_its_store_keeps_no_objects_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="domain instances") as caught:
        assembly.shared_objects(given(tmp_path, SHARED, "instances", "gpus"))
    assert caught.value.field == "instances.storage"
    assert "instances.directory" in caught.value.advice
    anchored = SHARED + "[audit]\nanchors = ['objects:']\n"
    with pytest.raises(SettingsError, match=r"audit\.anchors"):
        assembly.shared_objects(given(tmp_path, anchored, "gpus"))


@pytest.mark.parametrize(
    ("text", "only"),
    [("", ("instances",)), (SHARED, ("gpus",)), ("[audit]\nanchors = ['objects:']\n", ("gpus",))],
)
def test_a_server_that_is_alone_or_keeps_no_objects_needs_no_shared_storage(
    tmp_path: Path, text: str, only: tuple[str, ...]
) -> None:
    assert assembly.shared_objects(given(tmp_path, text, *only)) is None


def test_a_folder_that_was_chosen_and_a_bucket_are_shared(tmp_path: Path) -> None:
    folder = given(tmp_path, f"{SHARED}[instances]\ndirectory = '{tmp_path}/all'\n", "instances")
    assert isinstance(assembly.shared_objects(folder), LocalObjects)
    bucket = given(tmp_path, SHARED + "[instances]\nstorage = 's3'\nbucket = 'fleet'\n", "instances")
    assert assembly.shared_objects(bucket) is not None

"""Both generators of clients read each OpenAPI document, and what they make compiles.

A document that one of them rejects, or reads with a warning, leaves somebody without a client.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_python_client import generate
from openapi_python_client.config import Config, ConfigFile, MetaType
from support.shared.server_process import running_server

ROOT = Path(__file__).parent.parent.parent
NODE = ROOT / ".make" / "clients" / "node_modules" / ".bin"
DOCUMENTS = {
    "boards": "/api/v1/openapi.json",
    "edge": "/v1/edge/openapi.json",
    "instances": "/v1/instances/openapi.json",
    "proxies": "/openapi.json",
    "fleet": "/v1/fleet/openapi.json",
    "apis": "/apis/v1/openapi.json",
}
SECONDS = 240.0
"""For a generator on a busy machine; each takes a second or two."""
IMPORT = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    client = importlib.import_module(name)
    for module in pkgutil.walk_packages(client.__path__, f"{name}."):
        importlib.import_module(module.name)
"""
OF_ANY_CONTENT = {
    "apis ShownChange.new": "a field of any object, after",
    "apis ShownChange.old": "a field of any object, before",
    "edge ShownConfig.layer": "a document of the daemon's owner",
    "edge ShownConfig.merged": "a document of the daemon's owner",
    "edge ShownLayer.layer": "a document of the daemons' owner",
    "proxies AuditView.changes": "a field of any record, before and after",
    "proxies Difference.fields": "a field of any record, before and after",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The document of each family, as a server gives it."""
    folder = tmp_path_factory.mktemp("documents")
    found = {}
    with running_server(folder / "data", "--only", "boards,edge,gpus,instances,proxies") as server:
        for name, path in DOCUMENTS.items():
            found[name] = folder / f"{name}.json"
            found[name].write_bytes(httpx.get(f"{server.web}{path}").raise_for_status().content)
    return found


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_clients_are_made_of_every_document_without_a_warning(
    documents: Mapping[str, Path], tmp_path: Path
) -> None:
    for name, path in documents.items():
        config = Config.from_sources(
            ConfigFile(post_hooks=[]),
            MetaType.NONE,
            path,
            "utf-8",
            overwrite=False,
            output_path=tmp_path / f"{name}_client",
        )
        assert [f"{one.header}: {one.detail}" for one in generate(config=config)] == [], name
    run(sys.executable, "-c", IMPORT, *(f"{name}_client" for name in documents), cwd=tmp_path)


def test_typescript_clients_are_made_of_every_document_and_compile(
    documents: Mapping[str, Path], tmp_path: Path
) -> None:
    assert NODE.is_dir(), "the generator is missing; run: tools/setup.sh test"
    apis = {
        name: {"root": str(path), "x-openapi-ts": {"output": str(tmp_path / f"{name}.ts")}}
        for name, path in documents.items()
    }
    (tmp_path / "redocly.yaml").write_text(json.dumps({"apis": apis}))
    run(NODE / "openapi-typescript", "--redocly", "redocly.yaml", cwd=tmp_path)
    made = sorted(path.name for path in tmp_path.glob("*.ts"))
    assert made == sorted(f"{name}.ts" for name in documents)
    run(NODE / "tsc", "--noEmit", "--strict", *made, cwd=tmp_path)


def test_every_answer_is_described(documents: Mapping[str, Path]) -> None:
    """No answer and no part of one is 'anything', but where the content is somebody else's."""
    found = set()
    for name, path in documents.items():
        document = json.loads(path.read_bytes())
        for operation in (one for ways in document["paths"].values() for one in ways.values()):
            answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
            for answer in answers:
                for kind, content in answer.get("content", {}).items():
                    assert (
                        kind == "text/event-stream"
                        or "$ref" in str(content["schema"])
                        or (content["schema"].get("type") == "string")
                    ), operation["operationId"]
        schemas = document["components"]["schemas"]
        for shape in _reachable(document):
            for field, schema in schemas[shape].get("properties", {}).items():
                if any(_is_open(part) for part in _parts(schema)):
                    found.add(f"{name} {shape}.{field}")
    assert found == set(OF_ANY_CONTENT)


def _reachable(document: dict[str, Any]) -> set[str]:
    """The shapes that answers are made of."""
    schemas = document["components"]["schemas"]
    wanted = [
        answer
        for ways in document["paths"].values()
        for one in ways.values()
        for status, answer in one["responses"].items()
        if status.startswith("2")
    ]
    known: set[str] = set()
    while wanted:
        for part in _parts(wanted.pop()):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name and name not in known:
                known.add(name)
                wanted.append(schemas[name])
    return known


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and everything in it."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _parts(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _parts(one)


def _is_open(schema: dict[str, Any]) -> bool:
    return not schema or schema.get("additionalProperties") == {}

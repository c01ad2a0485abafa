from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.instances.configuration_samples import (
    EXAMPLE,
    SMALLEST,
    complaints,
    configuration,
    document,
    example,
    problems,
)

from fleetplane.domains.instances.configuration import ConfigurationInvalid, jsonc, parse
from fleetplane.kernel.errors import InvalidArgument

WORKER = SMALLEST["templates"]["worker"]


def file_complaints(name: str, file: dict[str, Any]) -> dict[str, str]:
    """The problems of a template with that one file, by their path within it."""
    found = complaints(
        templates__worker={**WORKER, "files": {name: file}}, certificates={"node": {"kind": "client"}}
    )
    prefix = f'templates.worker.files["{name}"]'
    assert all(path.startswith(prefix) for path in found)
    return {path.removeprefix(prefix).lstrip("."): message for path, message in found.items()}


def test_the_smallest_document_gets_every_default() -> None:
    config = configuration()

    assert config.cluster.leader_election.leader_timeout_seconds == 15.0
    assert config.shard.request_timeout_seconds == 30.0
    assert config.shard.health_check_interval_seconds == 60.0
    assert config.shard.default_drain_timeout_seconds == 300.0
    assert config.shard.garbage_collection.registration_timeout_seconds == 300.0
    assert config.shard.garbage_collection.deleted_record_retention_seconds == 1800.0
    assert config.shard.expiry.forced_age_seconds == 0.0
    assert config.templates["worker"].size == 1
    assert config.groups == {}


def test_the_example_is_valid_and_complete() -> None:
    config = example()

    assert config.cluster.secrets.prefix == "secret/"
    assert config.shard.expiry.eligible_age_seconds == 504 * 3600.0
    assert config.certificates["kubelet.server"].ttl_hours == 8760
    assert config.templates["controlplane"].files["kubelet.client.crt"].key is not None
    assert config.groups["default"]["apps"].size is None


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"stop_on_klose": True}, ".stop_on_klose", "did you mean 'stop_on_close'?"),
        ({"stop_on_close": 3}, "", "Expected `bool`, got `int` - at `$.stop_on_close`"),
    ],
)
def test_an_option_that_the_provider_would_refuse_is_told_at_its_place(
    options: dict[str, object], path: str, message: str
) -> None:
    infra = {"provider": "local", "region": "here", "zone": "here-a", "options": options}
    found = complaints(shard__infra=infra)
    assert list(found) == [f"shard.infra.options{path}"]
    assert message in found[f"shard.infra.options{path}"]


def test_an_explicit_zero_means_the_default_where_there_is_one() -> None:
    config = configuration(
        shard__default_drain_timeout="0s",
        shard__expiry={"eligible_age": "0"},
        certificates={"agent": {"kind": "client", "ttl": 0}},
        templates__worker={**WORKER, "size": 0},
        cluster__leader_election={"enabled": False},
    )

    assert config.shard.default_drain_timeout_seconds == 300.0
    assert config.shard.expiry.eligible_age_seconds == 0.0
    assert config.certificates["agent"].ttl_hours == 8760
    assert config.templates["worker"].size == 1
    assert config.cluster.leader_election.enabled is False


def test_null_is_the_same_as_leaving_it_out() -> None:
    text = json.dumps(document(shard__expiry={"eligible_age": "1h"})).replace('"1h"', "null")

    assert parse(text, name="x").shard.expiry.eligible_age_seconds == 0.0


def test_all_problems_are_reported_together_in_order_with_their_places() -> None:
    text = EXAMPLE.read_text()
    for right, wrong in [
        ('"id": "example-cluster"', '"id": "Example"'),
        ('"0.0.0.0:8993"', '"0.0.0.0:8992"'),
        ('"504h"', '"21d"'),
        ('"listener_port": 443', '"listener_port": 70000'),
        ('"sort": "creation-date"', '"srot": "creation-date"'),
        ("{{ .Instance.Hostname }}", "{{ .Instance.Hostnme }}"),
        ('"arch": "arm64"', '"arch": "riscv"'),
        ('"load_balancers": ["www"]', '"load_balancers": ["ww"]'),
    ]:
        assert right in text
        text = text.replace(right, wrong, 1)

    found = problems(text)

    assert [problem.path for problem in found] == [
        "cluster.id",
        "shard.bind.operator_addr",
        "shard.expiry.eligible_age",
        "load_balancers.www.target_groups[0].listener_port",
        "images.debian_13_arm64.sort",
        "images.debian_13_arm64.srot",
        'certificates["kubelet.server"].dns[2]',
        "templates.controlplane.arch",
        "groups.default.ingress.load_balancers[0]",
    ]
    lines = text.splitlines()
    wrong_values = ['"Example"', '"0.0.0.0:8992"', '"21d"', "70000", "{", '"srot"', '"{{ .Instance.Hostnme']
    for problem, value in zip(found, wrong_values, strict=False):
        assert lines[problem.line - 1][problem.column - 1 :].startswith(value), problem


def test_the_error_reads_well_and_names_the_first_field() -> None:
    with pytest.raises(ConfigurationInvalid) as caught:
        parse('{"cluster": {}, "shard": 7}', name="config.jsonc")

    error = caught.value
    assert isinstance(error, InvalidArgument)
    assert error.message == (
        "the configuration has 3 problems: config.jsonc:1:1: templates: 'templates' is required; "
        "config.jsonc:1:13: cluster.id: 'id' is required; "
        "config.jsonc:1:26: shard: must be an object, not a number"
    )
    assert error.field == "templates"


def test_text_that_is_not_json_or_not_utf8_is_one_problem_with_its_place() -> None:
    (syntax,) = problems('{\n  "cluster": {,}\n}')
    assert (syntax.line, syntax.column) == (2, 15)
    with pytest.raises(ConfigurationInvalid) as caught:
        parse(b'{\n "a\xff": 1}', name="x")
    (encoding,) = caught.value.problems
    assert (encoding.line, encoding.column, encoding.message) == (2, 4, "the text is not UTF-8 from here on")


def test_a_key_given_twice_is_a_problem() -> None:
    text = json.dumps(SMALLEST)[:-1] + ', "cluster": {"id": "other", "secrets": {"provider": "memory"}}}'

    (problem,) = problems(text)

    assert (problem.path, problem.column) == ("cluster", text.rindex('"cluster"') + 1)


def test_a_document_of_nonsense_does_not_become_a_book() -> None:
    found = problems({**SMALLEST, **{f"x{number}": 1 for number in range(1000)}})

    assert len(found) == 200


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"cluster__id": "-a"}, "cluster.id", "hyphens"),
        ({"cluster__id": "a--b"}, "cluster.id", "two hyphens"),
        ({"cluster__id": "x" * 33}, "cluster.id", "longer than 32"),
        ({"cluster__id": ""}, "cluster.id", "must not be empty"),
        ({"cluster__id": 5}, "cluster.id", 'must be a string, not a number; write "5"'),
        ({"shard__id": "A"}, "shard.id", "lower-case"),
        ({"groups": {"Acme": {}}}, "groups.Acme", "lower-case"),
        ({"groups": {"acme": {"A b": {"template": "worker"}}}}, 'groups.acme["A b"]', "lower-case"),
        ({"shard__infra__provider": "gcp"}, "shard.infra.provider", "which are installed, not 'gcp'"),
        ({"shard__infra__provider": "azure"}, "shard.infra.provider", "must be one of aws"),
        ({"shard__infra__zone": None}, "shard.infra.zone", "'zone' is required"),
        ({"shard__bnd": {}}, "shard.bnd", "did you mean 'bind'?"),
        ({"shard__request_timeout": 30}, "shard.request_timeout", 'write "30s"'),
        ({"shard__request_timeout": "-1s"}, "shard.request_timeout", "must not be negative"),
        ({"shard__bind__agent_addr": "127.0.0.1"}, "shard.bind.agent_addr", "must be host:port"),
        ({"shard__bind__agent_addr": "a..b:1"}, "shard.bind.agent_addr", "no host name"),
        ({"shard__bind__agent_addr": "[::g]:1"}, "shard.bind.agent_addr", "no IPv6 address"),
        ({"shard__advertise__agent_addr": "h:0"}, "shard.advertise.agent_addr", "not one from 1 to 65535"),
        (
            {"shard__bind__agent_addr": "127.0.0.1:8992"},
            "shard.bind.agent_addr",
            "bound by registration_addr",
        ),
        ({"shard__leader_network": {}}, "shard.leader_network.ip", "required"),
        (
            {"shard__garbage_collection": {"interval": "5m"}},
            "shard.garbage_collection.registration_timeout",
            "longer than garbage_collection.interval",
        ),
        (
            {"shard__expiry": {"eligible_age": "2h", "forced_age": "2h"}},
            "shard.expiry.eligible_age",
            "shorter",
        ),
        ({"shard__error_exit_jitter": {"max_delay": "1s"}}, "shard.error_exit_jitter.max_delay", "min_delay"),
        ({"shard__subnet_pools": {"a": []}}, "shard.subnet_pools.a", "at least one subnet"),
        ({"shard__subnet_pools": {"a": ["s"], "b": ["s"]}}, "shard.subnet_pools.b[0]", "in pool 'a' already"),
        ({"shard__dynamic_subnet_pools": ["a"]}, "shard.dynamic_subnet_pools[0]", "no subnet pool 'a'"),
        ({"cluster__secrets": {}}, "cluster.secrets.provider", "required when infrastructure is 'local'"),
        ({"cluster__secrets": {"provider": "object-storage"}}, "cluster.secrets.encryption_key", "required"),
        (
            {"cluster__secrets__encryption_key": {"provider": "env", "source": "K"}},
            "cluster.secrets.encryption_key",
            "only object-storage",
        ),
        (
            {"cluster__secrets": {"provider": "google-secret-manager"}},
            "cluster.secrets.project_id",
            "required",
        ),
        ({"cluster__secrets__project_id": "p"}, "cluster.secrets.project_id", "only for provider google"),
        ({"cluster__storage": {"provider": "ftp"}}, "cluster.storage.provider", "one of s3, gcs, file"),
        ({"templates__worker__kind": "kndx"}, "templates.worker.kind", "three lower-case letters"),
        ({"templates__worker__kind": "KND"}, "templates.worker.kind", "three lower-case letters"),
        ({"templates__worker__arch": "x86"}, "templates.worker.arch", "one of amd64, arm64"),
        ({"templates__worker__size": 1.5}, "templates.worker.size", "whole number"),
        ({"templates__worker__size": -1}, "templates.worker.size", "negative"),
        ({"templates__worker__vars": {"a": 1}}, "templates.worker.vars.a", 'write "1"'),
        ({"templates__worker__subnet_pool": "x"}, "templates.worker.subnet_pool", "no subnet pool 'x'"),
        ({"templates__worker__args": {"a": ["{{ .Nope }}"]}}, "templates.worker.args.a[0]", "no .Nope"),
        ({"templates__worker__args": {"a": "{{ .Nonce }}"}}, "templates.worker.args.a", "only user data"),
        ({"templates__worker__args": {"a": "{{ if }}"}}, "templates.worker.args.a", "a value is missing"),
        ({"defaults__userdata": {"content": ""}}, "defaults.userdata.content", "must not be empty"),
        (
            {"defaults__userdata": {"content": "a\n{{ .Nope }}"}},
            "defaults.userdata.content",
            "line 2 of the text",
        ),
        (
            {"defaults__userdata": {"content": "x", "encoding": "gzip"}},
            "defaults.userdata.encoding",
            "base64+gzip",
        ),
        (
            {"defaults__userdata": {"content": "?", "encoding": "base64"}},
            "defaults.userdata.content",
            "not base64",
        ),
        ({"defaults__userdata": {"content": "x", "source": "url"}}, "defaults.userdata.content", "URL"),
        (
            {"defaults__userdata": {"content": "http://x/y", "source": "url"}},
            "defaults.userdata.content",
            "must be an https URL",
        ),
        (
            {"defaults__userdata": {"content": "https://x/{{ .Nonce }}", "source": "url"}},
            "defaults.userdata.content",
            "only user data has .Nonce",
        ),
        (
            {
                "images": {
                    "a": {
                        "provider": "aws",
                        "filters": [{"name": "n", "values": ["v"]}],
                        "sort": "name",
                        "order": "asc",
                    }
                }
            },
            "images.a.provider",
            "'aws' is not the shard's provider, 'local'",
        ),
        ({"groups": {"t": {"g": {"template": "wrker"}}}}, "groups.t.g.template", "did you mean 'worker'"),
        ({"groups": {"t": {"g": {"size": 1}}}}, "groups.t.g.template", "'template' is required"),
        ({"groups": {"t": {"g": {"template": "worker", "size": -1}}}}, "groups.t.g.size", "negative"),
        (
            {"groups": {"t": {"g": {"template": "worker", "drain_timeout": "1d"}}}},
            "groups.t.g.drain_timeout",
            "write '24h'",
        ),
        ({"images": {"a-b": {"provider": "aws"}}}, "images.a-b", "underscores"),
        ({"certificates": {"x": {"kind": "peer"}}}, "certificates.x.kind", "one of client, server"),
        ({"certificates": {"x": {"kind": "client", "ttl": -1}}}, "certificates.x.ttl", "hours"),
        ({"certificates": {"x": {"kind": "client", "cn": "{{"}}}, "certificates.x.cn", "never closed"),
        ({"load_balancers": {"x": {"provider": "aws"}}}, "load_balancers.x.target_groups", "at least one"),
        (
            {
                "load_balancers": {
                    "x": {"provider": "tunnel", "listeners": [{"target_port": 0, "proxy_port": 1}]}
                }
            },
            "load_balancers.x.listeners[0].target_port",
            "port 0",
        ),
        (
            {
                "load_balancers": {
                    "x": {
                        "provider": "google",
                        "network_endpoint_groups": ["a"],
                        "frontends": [{"ip": "x", "port": 1}],
                        "listeners": [],
                    }
                }
            },
            "load_balancers.x.frontends[0].ip",
            "no IP address",
        ),
        (
            {"server": {"files": {"a/b": {"kind": "string", "template": "x"}}}},
            'server.files["a/b"]',
            "folder",
        ),
        ({"server": {"files": {"a.crt": {"kind": "certificate"}}}}, 'server.files["a.crt"].kind', "no agent"),
        ({"nat": {"t": {"group": "nat"}}}, "nat.t.group", "no group 'nat'"),
        (
            {"tunnels": {"x": {"image": "a:latest", "readiness_url": "http://127.0.0.1:1"}}},
            "tunnels.x.image",
            "must be pinned",
        ),
    ],
)
def test_each_rule_is_checked_and_says_where(changes: dict[str, Any], path: str, message: str) -> None:
    found = complaints(**changes)

    assert path in found
    assert message in found[path]


@pytest.mark.parametrize(
    "changes",
    [
        {"shard__infra__provider": "aws", "cluster__secrets": {}},
        {"shard__infra__provider": "google", "cluster__secrets": {"project_id": "p"}},
        {"shard__advertise__agent_addr": ":8994"},
        {"shard__advertise__agent_addr": "[::1]:8994"},
        {"shard__bind__agent_addr": "host-1.example.net:8994"},
        {"shard__expiry": {"eligible_age": "2h"}},
        {"server": {"files": {"notes.txt": {"kind": "string", "template": "{{ .Cluster.ID }}"}}}},
        {"defaults__userdata": {"content": "{{ .Nonce }}"}},
        {"defaults__userdata": {"source": "url", "content": "storage:boot/{{ .Instance.Kind }}.sh"}},
        {"defaults__userdata": {"content": "{{ .Instance.ReportInterval }}"}},
        {"defaults__userdata": {"source": "url", "content": "https://x/y", "encoding": "gzip"}},
        {"templates__worker__args": {"a": "{{ range .Vars }}{{ . }}{{ end }}{{ $.Image.x }}"}},
    ],
)
def test_what_the_rules_allow_passes(changes: dict[str, Any]) -> None:
    configuration(**changes)


def test_secrets_follow_the_infrastructure() -> None:
    aws = configuration(shard__infra__provider="aws", cluster__secrets={}).cluster.secrets
    google = configuration(shard__infra__provider="google", cluster__secrets={"project_id": "p"})

    assert (aws.provider, aws.prefix) == ("aws-parameter-store", "/nstance/")
    assert google.cluster.secrets.prefix == "nstance-"


@pytest.mark.parametrize(
    ("name", "file", "where", "message"),
    [
        ("a.conf", {"kind": "string", "template": "x"}, "", "accept only .env, .crt, .pub, .key, .json"),
        ("run.sh", {"kind": "secret", "source": "x"}, "", "accept only"),
        ("a.environment", {"kind": "env", "template": {}}, "", "accept only"),
        (".env", {"kind": "env", "template": {}}, "", "begin with a dot"),
        ("write-files.last", {"kind": "secret", "source": "x"}, "", "agent's own"),
        ("../a.env", {"kind": "env", "template": {}}, "", "without a folder"),
        ("a.json", {"kind": "env", "template": {}}, "", "must end in .env"),
        ("a.pem", {"kind": "certificate", "template": "node"}, "", "accept only"),
        ("a.key", {"kind": "secret"}, "source", "'source' is required for kind secret"),
        ("a.json", {"kind": "storage"}, "source", "'source' is required for kind storage"),
        ("a.json", {"kind": "storage", "source": "{{ .X }}"}, "source", "no .X"),
        ("a.crt", {"kind": "certificate", "template": "node"}, "key", "'key' is required"),
        ("a.crt", {"kind": "certificate", "key": {"source": "agent", "name": "a"}}, "template", "required"),
        (
            "a.crt",
            {"kind": "certificate", "template": "nod", "key": {"source": "agent", "name": "a"}},
            "template",
            "did you mean 'node'",
        ),
        (
            "a.crt",
            {"kind": "certificate", "template": {}, "key": {"source": "agent", "name": "a"}},
            "template",
            "must be the name",
        ),
        (
            "a.crt",
            {"kind": "certificate", "template": "node", "key": {"source": "server", "name": "a"}},
            "key.source",
            "one of agent",
        ),
        (
            "a.crt",
            {"kind": "certificate", "template": "node", "key": {"source": "agent", "name": "a/b"}},
            "key.name",
            "without a folder",
        ),
        ("a.env", {"kind": "env"}, "template", "'template' is required"),
        ("a.env", {"kind": "env", "template": "A=b"}, "template", "must be an object"),
        ("a.env", {"kind": "env", "template": {"a": "x"}}, "template.a", "A to Z"),
        ("a.env", {"kind": "env", "template": {"A": 1}}, "template.A", "must be a string"),
        ("a.env", {"kind": "env", "template": {"A": "{{ .Vars.x }"}}, "template.A", "unexpected '}'"),
        ("a.json", {"kind": "json", "template": []}, "template", "must be an object"),
        ("a.json", {"kind": "json", "template": {"x": [{"y": "{{end}}"}]}}, "template.x[0].y", "{{end}}"),
        ("a.json", {"kind": "string", "template": {}}, "template", "must be a string"),
        ("a.json", {"kind": "string", "template": "x", "source": "y"}, "source", "no meaning"),
        ("a.json", {"kind": "yaml", "template": "x"}, "kind", "must be one of secret"),
    ],
)
def test_files_that_an_agent_would_refuse_or_nobody_could_make_are_refused(
    name: str, file: dict[str, Any], where: str, message: str
) -> None:
    found = file_complaints(name, file)

    assert where in found
    assert message in found[where]


def test_nat_rules_name_what_is_wrong() -> None:
    groups = {"t": {"nat": {"template": "worker", "size": 1}}}
    nat = {
        "group": "nat",
        "instance_type_ladder": ["s"],
        "scale_up_window": "1m",
        "scale_down_thresholds": {"cpu_percent": 90},
        "public_addresses": [{"ipv4": "::1"}],
    }

    found = complaints(groups=groups, nat={"t": nat})

    assert set(found) == {
        "groups.t.nat.size",
        "groups.t.nat.instance_type",
        "nat.t.instance_type_ladder",
        "nat.t.scale_up_window",
        "nat.t.scale_down_thresholds.cpu_percent",
        "nat.t.public_addresses[0].ipv4",
    }


def test_the_older_shape_is_refused_with_the_way_to_move() -> None:
    older = {
        "server": {"cluster_id": "x", "provider": {"kind": "aws"}, "shard": "a", "expiry": {}},
        "groups": {"main": {"template": "knc", "size": 1}},
        "templates": {"knc": {"kind": "knc", "userdata": {"templateString": "x"}}},
    }

    found = {problem.path: problem.message for problem in problems(older)}

    assert "older document shape" in found["server"]
    assert found["server.cluster_id"] == "is now cluster.id"
    assert found["server.provider"] == "is now shard.infra, with its kind as shard.infra.provider"
    assert found["templates.knc.userdata.templateString"] == 'is now written {"content": …}'
    assert found["groups.main"].endswith("groups.default.main")


def test_older_keys_in_a_document_of_today_are_told_their_new_names() -> None:
    found = complaints(
        groups={"main": {"template": "worker"}},
        load_balancers={"www": {"provider": "aws", "target_group_arns": ["a"]}},
    )

    assert found["groups.main"].startswith("groups are listed by tenant now")
    assert found["load_balancers.www.target_group_arns"].startswith("is now target_groups")
    assert not any(path.startswith("groups.main.") for path in found)


def _paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


SAMPLE = jsonc.parse(EXAMPLE.read_text()).value
PATHS = list(_paths(SAMPLE))[1:]
STRANGE: list[object] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    "",
    "x",
    "{{",
    "{{.X}}",
    "{{.Vars.a.b}}",
    "1h",
    "a/b",
    [],
    [None],
    [[]],
    {},
    {"": {}},
    {"a": {"b": {"c": 1}}},
]


@given(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(STRANGE)), min_size=1, max_size=4))
def test_any_value_anywhere_is_accepted_or_reported_with_a_place_in_the_text(
    mutations: list[tuple[tuple[str | int, ...], Any]],
) -> None:
    made: Any = copy.deepcopy(SAMPLE)
    for (*parents, last), value in mutations:
        holder = made
        for parent in parents:
            holder = holder[parent] if parent in _keys(holder) else None
        if last in _keys(holder):
            holder[last] = copy.deepcopy(value)
    text = json.dumps(made, indent=1)
    try:
        parse(text, name="x")
    except ConfigurationInvalid as invalid:
        lines = text.splitlines()
        assert all(problem.column <= len(lines[problem.line - 1]) for problem in invalid.problems)


def _keys(holder: object) -> Collection[str | int]:
    return (
        holder.keys() if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
    )

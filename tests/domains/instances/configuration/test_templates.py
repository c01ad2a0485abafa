"""Every expected text was made by Go's text/template with the same data and missingkey=zero."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.instances.configuration_samples import example

from fleetplane.domains.instances.configuration import merge
from fleetplane.domains.instances.configuration.rendering import (
    render_file,
    render_json,
    render_text,
    template_data,
)
from fleetplane.domains.instances.configuration.schema import FileSection
from fleetplane.domains.instances.configuration.templates import template as templates
from fleetplane.domains.instances.configuration.templates.template import (
    Fields,
    Template,
    TemplateData,
    TemplateInvalid,
)
from fleetplane.kernel.errors import InvalidArgument

DATA = Fields(
    Instance=Fields(ID="knc1", Kind="knc", Hostname="h"),
    Vars={"a": "x", "b": "y<z>", "a-b": "dash", "Env": "prod", "e": ""},
    Image={"debian": "ami-1"},
    Any={"n": 5, "f": 2.5, "t": True, "l": ["p", 1, None], "m": {"k": "v"}},
    List=["one", "two", "thrée"],
    Empty=[],
)


def render(text: str) -> str:
    return templates.compile(text).render(DATA)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("plain } { }} text", "plain } { }} text"),
        ("{{.Vars.a}} {{ .Vars.a }}", "x x"),
        ("[{{ .Vars.missing }}]", "[]"),
        ('{{index .Vars "a-b"}}[{{index .Vars "nope"}}]', "dash[]"),
        ('{{index .List 1}} {{index .Any "m" "k"}} {{(index .Any "m").k}}', "two v v"),
        ("a {{- .Vars.a -}} b", "axb"),
        ("a {{-3}} b", "a -3 b"),
        ("a \n {{- 3 -}} \t b", "a3b"),
        ("x{{/* c }} */}}y {{- /* c\n */ -}} z", "xyz"),
        ('{{"}}"}}{{`raw "x" \\n`}}', '}}raw "x" \\n'),
        (r'{{"a\u00e9\U0001F600\x41\101\t"}}', "aé😀AA\t"),
        ("{{if .Vars.e}}A{{else}}B{{end}}", "B"),
        ('{{if eq .Vars.Env "dev"}}A{{else if eq .Vars.Env "prod"}}P{{else}}B{{end}}', "P"),
        ('{{if (and (eq .Vars.Env "prod") (ne .Vars.a ""))}}yes{{end}}', "yes"),
        ('{{or .Vars.e "dflt"}} {{and .Vars.a .Vars.b}} {{not .Vars.e}}', "dflt y<z> true"),
        ("{{1 | and 0}} {{1 | or 0}}", "0 1"),
        ("{{or 1 .Vars.a.b}}", "1"),
        ("{{range .List}}[{{.}}]{{end}}", "[one][two][thrée]"),
        ("{{range $i, $v := .List}}{{$i}}:{{$v}} {{end}}", "0:one 1:two 2:thrée "),
        ("{{range $k, $v := .Vars}}{{$k}}={{$v}};{{end}}", "Env=prod;a=x;a-b=dash;b=y<z>;e=;"),
        ("{{range $v := .Empty}}x{{else}}none{{end}}", "none"),
        ("{{range $k, $v := .Empty}}x{{else}}{{$v}}none{{end}}", "[]none"),
        ("{{with .Vars.a}}<{{.}}>{{$.Vars.b}}{{else}}no{{end}}", "<x>y<z>"),
        ("{{with .Vars.e}}a{{else with .Vars.a}}b{{.}}{{else}}c{{end}}", "bx"),
        ("{{with $x := .Vars.a}}{{$x}}{{end}}", "x"),
        ('{{$x := .Vars.a}}{{$x}}{{$x = "new"}}{{$x}}', "xnew"),
        ("{{$x := 1}}{{if true}}{{$x = 2}}{{$x := 3}}{{$x}}{{end}}{{$x}}", "32"),
        ('{{printf "%s-%s" .Vars.a .Instance.ID}}', "x-knc1"),
        ('{{printf "%d|%5d|%-5d|%05d|%+d|%x|%X" 5 5 5 5 5 255 255}}', "5|    5|5    |00005|+5|ff|FF"),
        ('{{printf "%q %v %t%%" .Vars.b .Any.f true}}', '"y<z>" 2.5 true%'),
        (r'{{printf "%q" "a\n\t\"\\é\x01"}}', r'"a\n\t\"\\é\x01"'),
        ('{{printf "%5s|%-5s|%.1s|%x" "ab" "ab" "ab" "hi"}}', "   ab|ab   |a|6869"),
        ('{{printf "%f %.2f %08.3f %e" .Any.f .Any.f .Any.f .Any.f}}', "2.500000 2.50 0002.500 2.500000e+00"),
        ('{{"a" | printf "%s%s" "b"}} {{.Vars.b | html | printf "%s!"}}', "ba y&lt;z&gt;!"),
        ('{{len .List}} {{len "thrée"}} {{.Vars|len}}', "3 6 5"),
        ('{{slice .List 1 2}} {{slice "abc" 1}}', "[two] bc"),
        ('{{print 1 2 "a" 3 4}} {{print "a" "b"}} {{println "a" 1}}', "1 2a3 4 ab a 1\n"),
        ('{{html "<a href=\'x\'>&\\""}}', "&lt;a href=&#39;x&#39;&gt;&amp;&#34;"),
        (r"""{{js "it's <\"x\"> = \\ \n"}}""", r"it\'s \u003C\"x\"\u003E \u003D \\ \u000A"),
        ('{{urlquery "a b&c/d~é+"}}', "a+b%26c%2Fd~%C3%A9%2B"),
        (
            '{{eq 1 1}} {{eq "a" "b" "a"}} {{ne 1 2}} {{lt "a" "b"}} {{le 2 2}} {{gt 1 2}} {{ge 2 1}}',
            "true true true true true false true",
        ),
        (
            "{{.List}} {{.Any.m}} {{.Any.l}} {{.Any.n}} {{.Any.t}}",
            "[one two thrée] map[k:v] [p 1 <nil>] 5 true",
        ),
        (
            "{{1e3}} {{123456.0}} {{1234567.0}} {{1e21}} {{0.0001}} {{0.00001}} {{-2.50}} {{.5}}",
            "1000 123456 1.234567e+06 1e+21 0.0001 1e-05 -2.5 0.5",
        ),
    ],
)
def test_templates_render_as_in_go(text: str, rendered: str) -> None:
    assert render(text) == rendered


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("{{.Vars.a}", 1, "unexpected '}'"),
        ("a\n{{.Vars.a", 2, "never closed"),
        ('{{"unclosed}}', 1, "string is not closed"),
        ("{{}}", 1, "nothing between"),
        ("a\nb{{if .Vars.a}}x", 2, "{{if}} is never ended"),
        ("{{end}}", 1, "unexpected {{end}}"),
        ("{{else}}", 1, "unexpected {{else}}"),
        ("{{if 1}}{{else}}{{else}}{{end}}", 1, "second else"),
        ("{{if 1}}{{else range .List}}{{end}}", 1, "unexpected 'range' after else"),
        ("{{if}}x{{end}}", 1, "value is missing"),
        ("{{if 1}}{{end 1}}", 1, "after end"),
        ("{{.Vars.a |}}", 1, "value is missing"),
        ("{{lower .Vars.a}}", 1, "no function 'lower'"),
        ("{{.Vars.a .Vars.b}}", 1, "only a function can be followed"),
        ('{{"a" | .Vars.b}}', 1, "only a function can stand behind |"),
        ("{{len(.Vars.a)}}", 1, "space before '('"),
        ('{{.Vars.a"b"}}', 1, "space before"),
        ("{{$x}}", 1, "undefined variable $x"),
        ("{{if $x := 1}}{{end}}{{$x}}", 1, "undefined variable $x"),
        ("{{$x = 1}}", 1, "undefined variable $x"),
        ("{{$a, $b := .List}}", 1, "only range declares two"),
        ("{{(.Vars.a}}", 1, "never closed"),
        ("{{.Vars.a)}}", 1, "unexpected ')'"),
        ("x{{ /* c */ }}y", 1, "unexpected '/'"),
        ("x{{/* c */ }}y", 1, "alone between its braces"),
        ("{{'a'}}", 1, "character constants"),
        ("{{0x10}}", 1, "not a decimal number"),
        ("{{017}}", 1, "not a decimal number"),
        ("{{nil}}", 1, "nil is not supported"),
        ('\n\n{{define "x"}}a{{end}}', 3, "{{define}} is not supported"),
        ('{{template "x"}}', 1, "{{template}} is not supported"),
        ("{{range .List}}{{break}}{{end}}", 1, "{{break}} is not supported"),
        (r'{{"\q"}}', 1, "no escape sequence"),
        (r'{{"\xff"}}', 1, "no escape sequence"),
        ("{{if 1}}" * 40 + "{{end}}" * 40, 1, "nested deeper than 32"),
        ("{{" + "(" * 40 + "1" + ")" * 40 + "}}", 1, "nested deeper than 32"),
    ],
)
def test_what_is_outside_the_language_is_refused_with_its_line(text: str, line: int, complaint: str) -> None:
    with pytest.raises(TemplateInvalid) as caught:
        templates.compile(text)

    assert complaint in caught.value.complaint
    assert caught.value.line == line
    assert caught.value.message.startswith(f"template line {line}: ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{{.Instance.Nope}}", "no .Nope here; known: ID"),
        ("{{.Nope}}", "no .Nope here"),
        ("{{.Vars.a.b}}", "a string has no .b"),
        ("{{.}}", "a single value is wanted"),
        ("{{range .Vars.a}}x{{end}}", "range cannot go over a string"),
        ("{{index .List 5}}", "out of range"),
        ('{{index .List "a"}}', "cannot index a list by a string"),
        ('{{slice "thrée" 0 4}}', "cut a character"),
        ("{{slice .List 2 1}}", "out of range"),
        ('{{printf "%d" "x"}}', "cannot print a string with '%d'"),
        ('{{printf "%s" 5}}', "cannot print a number with '%s'"),
        ('{{printf "%d"}}', "no argument left"),
        ('{{printf "%d" 1 2}}', "1 arguments more"),
        ('{{printf "%9999d" 1}}', "pads to at most"),
        ('{{eq 1 "a"}}', "cannot compare a number with a string"),
        ("{{lt true false}}", "no order"),
        ("{{eq .List .List}}", "cannot be compared"),
        ("{{len 3}}", "len of a number"),
        ("{{not 1 2}}", "not wants one argument"),
        ("{{and}}", "and wants an argument"),
        ("{{call .Vars.a}}", "no functions"),
    ],
)
def test_what_cannot_be_rendered_is_refused_rather_than_printed(text: str, complaint: str) -> None:
    with pytest.raises(TemplateInvalid) as caught:
        render(text)

    assert complaint in caught.value.complaint


def test_loops_are_bounded_over_the_whole_template() -> None:
    many = {"l": list(range(200))}

    with pytest.raises(TemplateInvalid, match="loops more than 10000 times"):
        templates.compile("{{range .l}}{{range $.l}}{{end}}{{end}}").render(many)


def test_output_and_every_string_on_the_way_are_bounded() -> None:
    doubling = '{{$x := "ab"}}{{range .l}}{{$x = print $x $x}}{{end}}'

    with pytest.raises(TemplateInvalid, match="print makes more than"):
        templates.compile(doubling).render({"l": list(range(100))})
    with pytest.raises(TemplateInvalid, match="renders more than"):
        templates.compile("{{range .l}}{{$.big}}{{end}}").render({"l": [0] * 20, "big": "x" * 100_000})
    with pytest.raises(TemplateInvalid, match="has more than"):
        templates.compile("x" * (1 << 19))


def test_a_template_tells_which_fields_it_needs_before_there_is_data() -> None:
    def names(template: Template) -> list[tuple[str, ...]]:
        return [reference.names for reference in template.references]

    assert names(templates.compile("{{.A.B}}{{with .C}}{{.D}}{{$.E}}{{else}}{{.F}}{{end}}")) == [
        ("A", "B"),
        ("C",),
        ("E",),
        ("F",),
    ]


words = st.sampled_from(
    [
        ".Vars.a",
        ".",
        "$",
        "$x",
        "1",
        '"s"',
        "(",
        ")",
        "|",
        ":=",
        ",",
        "if",
        "else",
        "end",
        "range",
        "with",
        "printf",
        "index",
        "len",
        "eq",
        "}}",
        "{{",
        "{{-",
        "-}}",
        "/*",
        "*/",
        "é",
        "\n",
        "'",
        "`",
        '"',
        " ",
    ]
)


@settings(max_examples=300)
@given(st.lists(words, max_size=14))
def test_any_text_renders_or_is_refused_by_line(parts: list[str]) -> None:
    text = "{{" + " ".join(parts) + "}}"
    try:
        render(text)
    except TemplateInvalid as refused:
        assert 1 <= refused.line <= text.count("\n") + 1


def node(**facts: str) -> TemplateData:
    return TemplateData(instance_id="knd1", instance_kind="knd", vars={"v": "1"}, **facts)  # type: ignore[arg-type]


def test_the_data_has_the_documented_fields_and_the_nonce_only_when_given() -> None:
    fields = node(ip4="10.0.0.9").mapping()

    assert {name: sorted(part) for name, part in fields.items() if isinstance(part, Fields)} == {
        "Instance": ["Arch", "FQDN", "Hostname", "ID", "IP4", "IP6", "Kind", "ReportInterval", "Type"],
        "Cluster": ["CACert", "ID", "WorkloadCACert"],
        "Server": ["AgentAddr", "OperatorAddr", "RegistrationAddr", "Shard"],
        "Provider": ["Kind", "Region", "Zone"],
    }
    assert "Nonce" not in fields
    assert render_text("{{.Nonce}} {{.Instance.IP4}}", node(nonce="jwt")) == "jwt "


def test_an_env_file_is_sorted_lines_without_an_end() -> None:
    file = FileSection(kind="env", template={"B": "{{ .Vars.v }}", "A": "two words", "C": ""})

    assert render_file(file, node()) == b"A=two words\nB=1\nC="


def test_a_value_of_two_lines_never_becomes_two_variables() -> None:
    file = FileSection(kind="env", template={"A": "{{ .Cluster.CACert }}"})

    with pytest.raises(InvalidArgument, match="several lines"):
        render_file(file, node(ca_cert="x\nPATH=/evil"))


def test_a_json_file_is_indented_and_only_its_strings_are_rendered() -> None:
    file = FileSection(
        kind="json", template={"port": 10250, "id": "{{ .Instance.ID }}", "l": ["<{{.Vars.v}}>", None]}
    )

    assert render_file(file, node()) == (
        b'{\n  "id": "knd1",\n  "l": [\n    "\\u003c1\\u003e",\n    null\n  ],\n  "port": 10250\n}'
    )


def test_kinds_that_are_no_templates_are_not_rendered() -> None:
    with pytest.raises(InvalidArgument, match="kind secret"):
        render_file(FileSection(kind="secret", source="x"), node())


def test_the_example_renders_for_an_instance() -> None:
    config = example()
    group = merge.effective(config, "default", "main", None)
    assert group is not None
    assert group.userdata is not None
    data = template_data(
        config,
        group,
        instance_id="knc1",
        ca_cert="PEM",
        ip4="10.0.0.9",
        images={"debian_13_arm64": "ami-7"},
        nonce="jwt",
    )

    assert render_file(group.files["instance.env"], data) == (
        b"API_HOST=example-cluster.example.net\nINSTANCE_ID=knc1\nNODE_LABELS=controlplane"
    )
    assert render_json(group.args, data) == {**group.args, "ImageId": "ami-7"}
    userdata = render_text(group.userdata.content, data)
    assert "\njwt\n" in userdata
    assert userdata.endswith("PEM\nsystemctl disable --now ssh\n")

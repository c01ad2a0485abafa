// Run by tests/web/test_console_model.py, with the model as `m` and `yaml.mjs` as `y`.
const row = (name, revision, labels = {}, state = "ok", scope = "/") => ({
  cells: [name, state], object: {resource: "lamps", name, scope, uid: `u-${name}`},
  value: {kind: "lamp", metadata: {name, scope, uid: `u-${name}`, labels, revision, generation: 1}, spec: {room: "attic"},
          status: {}, conditions: [{type: "Ready", status: "False", reason: "Dark", message: "no light"}]},
});
const kind = {name: "lamp", plural: "lamps", shortNames: [], domains: ["x"], relates: [{resource: "room", path: ".spec.room"}],
  columns: [{title: "NAME", type: "text", wide: false}, {title: "STATE", type: "text", wide: false}]};
const names = (world) => [...m.itemsOf(world, "lamps").values()].map((one) => one.name);
const events = (world, list) => list.map(([kind, data, mark = ""], at) => m.apply(world, {kind, data, mark}, 1000 + at));
const results = {};

{ // A snapshot, changes, a cut with a new snapshot in which one is gone.
  const world = m.nothing();
  m.beginSnapshot(world);
  events(world, [["added", row("a", 1)], ["added", row("b", 2)]]);
  results.beforeBookmark = [world.synced, world.revision, world.recent.length];
  events(world, [["bookmark", {revision: 2}, "2"], ["modified", row("a", 3), "3"], ["deleted", row("b", 2), "4"]]);
  results.after = [world.synced, world.revision, names(world), world.recent.map((one) => `${one.type} ${one.name}`)];
  results.marked = m.itemsOf(world, "lamps").get("u-a").changedMs;
  m.replaceComputed(world, "rooms", [{cells: ["attic"], object: {resource: "rooms", name: "attic", scope: "/", uid: "r"}}], 5);
  results.again = events(world, [["compacted", {}], ["later", {}]]);
  events(world, [["measured", {}], ["measured", {}]]);
  results.measured = [world.measured, world.revision];
  results.begins = world.revision;
  m.beginSnapshot(world);
  events(world, [["added", row("c", 9)], ["bookmark", {revision: 9}, "9"]]);
  results.resynced = [names(world), m.itemsOf(world, "rooms").size, world.revision];
  results.related = m.related(world, [kind, {name: "room", plural: "rooms", relates: []}], kind, row("c", 9).value);
}
{
  const items = [row("a", 1, {role: "web"}), row("b", 1, {role: "db", env: "test"}, "failed", "/tenants/acme"), row("c", 1)].map((one) => m.itemOf(one, 0));
  const found = (filter) => m.selected(items, kind, filter).map((one) => one.name).join("");
  results.selected = [found({}), found({q: "B te"}), found({labels: "role=web"}), found({labels: "role!=web"}),
    found({labels: "role in (web, db),!env"}), found({labels: "role notin (web)"}), found({labels: "role"}), found({scope: "/tenants"}),
    found({scope: "/ten"}), found({trouble: true}), found({sort: "-NAME"})];
  try { found({labels: "role~web"}); } catch (error) { results.refused = error.message; }
  results.sentence = m.sentence(kind, items);
  results.calm = m.sentence(kind, items.slice(0, 1));
}
results.place = m.placeOf(m.hashOf("lamps", "a/b c", {scope: "/tenants/acme", q: ""}));
results.bad = m.placeOf("#/lamps/%E0%A4%A");
results.ages = [m.since("2026-01-01T00:00:00Z", Date.parse("2026-01-01T01:00:00Z")), m.since("2026-01-03T00:00:00Z", Date.parse("2026-01-01T00:00:00Z"))];
results.fields = m.fieldsOf({$ref: "#/$defs/Body", $defs: {Body: {required: ["size"], properties: {
  size: {type: "integer", description: "how many"}, note: {anyOf: [{type: "string"}, {type: "null"}]},
  force: {type: "boolean", default: true}, words: {type: "array", items: {type: "string"}}, more: {type: "object"}}}}})
  .map((one) => [one.name, one.type, one.required]);
results.yaml = y.yaml({a: {b: [1, {c: "x: y", d: []}], e: null, f: "yes"}, "g h": "plain words", i: "7"});
results.quoted = [m.quoted("role=web"), m.quoted("it's here")];
{
  const cells = new Map();
  const run = [["fleet_started", {}], ["command_started", {node_id: "a"}], ["command_started", {node_id: "b"}], ["command_started", {node_id: "c"}],
    ["command_progress", {node_id: "a", chunk: {stdout: "one\n"}}], ["command_progress", {node_id: "a", chunk: {stderr: "two\n"}}],
    ["command_result", {node_id: "a", result: {ok: {exit_code: 0}}}], ["command_result", {node_id: "b", result: {err: {code: "internal", message: "no"}}}],
    ["command_result", {node_id: "c", result: {err: {code: "cancelled", message: "by operator"}}}], ["fleet_result", {}]];
  const ends = run.map(([kind, data]) => edge.takeRunEvent(cells, {kind, data}));
  results.run = [ends.indexOf(true), [...cells.values()].map((one) => [one.id, one.outcome, one.output, one.message])];
}
results.scaling = [groups.scaleWords(2, 2), groups.scaleWords(2, 3), groups.scaleWords(5, 2)];
{
  const now = Date.parse("2026-01-01T00:00:00Z");
  results.expiry = ["2026-03-01T00:00:00Z", "2026-01-11T00:00:00Z", "2026-01-02T00:00:00Z", "2025-12-31T00:00:00Z", null].map((one) => Object.values(proxies.expiryOf(one, now)));
}
{
  const at = (...moments) => moments.map((one) => ({at: one, value: one + 1}));
  const aligned = charts.alignedOf([{name: "", points: at(0, 10, 20, 90, 100)}, {name: "", points: at(10, 45, 100)}], 10);
  results.aligned = aligned.map((one) => one.map((value) => value === undefined ? "none" : value));
  results.alone = [[1, 2, null, 3, null, 4, 5], [1, undefined, 2, null], [undefined, 7], [null, null], []].map(plots.aloneOf);
  results.scales = [[[3, 7], {}], [[3, 7], {most: 100, threshold: 90}], [[-5, 2], {threshold: 80}], [[120], {most: 100}], [[0], {}]].map(([values, how]) => charts.scaleOf(values, how));
}
results.figures = audit.auditFigures('# HELP x\nfleetplane_audit_entries 85.0\nfleetplane_audit_anchor_behind{anchor="file:/a"} 13.0\n');
results.valueAt = [3, 14, 60].map((at) => charts.valueAt([0, 10, 20].map((one) => ({at: one, value: one * 2})), at, 10));
{
  const text = '{\n  "size": 2,\n  "vars": {\n    "A": "x"\n  },\n  "places": [\n    {"path": "/"},\n    {"path": "/b"}\n  ]\n}';
  const { value, lines: found } = lines.parseLines(text);
  results.parsed = JSON.stringify(value) === JSON.stringify(JSON.parse(text));
  results.fieldLines = ["objects[0].spec.size", "spec.vars.A", "vars.B", "objects[0].spec.places[1].path", "places.0", "nothing", ""].map((one) => lines.lineOfField(found, one));
  results.wrongLines = ['{\n"a": 1,\n}', '{"a": 1\n"b": 2}', '{"a": [1,\n2,\nx]}', '{"a": 1,\n\n"a": 2}', '{"a": "\\q"}', '{"a": 01}', '{}\n1', ''].map((one) => {
    try { lines.parseLines(one); return "taken"; } catch (error) { return [error.line, error.message]; }
  });
}
results.rest = hosts.restForm({serverName: "a", certificate: "a.example", tls: null, locations: [{path: "/", upstream: "backend", headers: {"X-Frame-Options": "DENY"}}], http2Enabled: true,
  customDirectives: {client_max_body_size: "1m"}, targetAgents: {type: "agents", agents: ["one", "two"]}, access: {accessLists: ["staff"]}}, (list, name) => `${list}:${name}`);
results.about = [{scope: "", name: "n"}, {scope: "org/1/agent/n", name: "7"}, {scope: "org/no", name: "non"}].map((one) => history.isAbout(one, new Set(["n"])));
results.moments = history.ownMoments({metadata: {createdAt: "1970-01-01T00:00:00Z"}, conditions: [{type: "Ready", status: "True", reason: "Ok", changedAt: "2026-01-01T00:00:00Z"}], status: {state: "online", since: "2026-01-02T00:00:00Z"}});
{
  const figures = (requests, bad) => ({requests, status_codes: {"4xx": bad, "5xx": bad}, latency_ms: {p50: 1, p95: 9, p99: 10}});
  results.traffic = [observed.trafficWords({total: figures(200, 5), day_before: figures(100, 0)}), observed.trafficWords({total: figures(0, 0), day_before: figures(0, 0)})];
}
results.outcomes = [{state: "failed", success: false, message: "no"}, {state: "done", success: true, message: "", exit_code: 0, duration_seconds: 0.5}].map(programs.outcomeWords);
results.operation = provisioning.operationWords({action: "check", state: "failed", reason: "no route", steps: [{finished_at: "x"}, {finished_at: null}]});
results.deployments = [undefined, {version: 3, in_service: true, error: ""}, {version: 3, state: "applying", attempt: 2, error: ""}, {version: 3, state: "failed", error: "port 443 is taken"}].map(proxies.deploymentWords);
results.organizations = [["user/1", "org/o/ws/w"], ["agent/1", "org/o"], ["user/1", "tenant/a"]].map(([actor, scope]) => audit.organizationOf({spec: {actor, changes: [{scope}]}}));
results.sets = [programs.setTrouble({attic: "no", cellar: "ended"}), programs.setTrouble(undefined)];
results.tones = ["emerg", "error", "warn", "info", undefined].map(logs.levelTone);
{
  const noon = new Date(2026, 0, 2, 12);
  const at = (hours) => new Date(noon.getTime() + hours * 3_600_000).toISOString();
  results.today = overview.changedToday([["9", at(-1), "account/ada", "hosts.put", 2], ["8", at(-2), "board/1", "boards.report", 1], ["7", at(-2), "token/t", "people.console_login", 1], ["6", at(-13), "account/ada", "hosts.put", 1]], noon.getTime())
    .map((one) => [one.number, one.actor, one.action, one.count]);
}
{
  const happened = (type, name) => ({type, plural: "rollouts", name, scope: "/", atMs: 0});
  results.folded = overview.folded([happened("modified", "a"), happened("modified", "a"), happened("added", "a"), happened("modified", "b"), happened("modified", "a")])
    .map((one) => [one.type, one.name, one.times]);
}
{
  const item = (plural, name, value = {}) => ({plural, name, scope: "/", value});
  const pins = ["1", "2", "3"].map((name) => item("pins", name, {spec: {board: "b"}}));
  const host = item("virtual-hosts", "shop");
  results.attention = [[pins], [pins, 4], [[...pins, item("boards", "b"), item("boards", "c")], 4], [[host]], [[host, host, pins[0]], 1],
    [[item("gpus", "0", {status: {provider: "n"}}), item("gpus", "1", {status: {provider: "n"}}), item("providers", "n")], 1]]
    .map((given) => overview.attentionWords(...given));
}
{ // A field that may be null is not given unless somebody chooses.
  globalThis.Node = class { dataset = {}; children = []; append(...more) { this.children.push(...more); } setAttribute(name, text) { this[name] = text; } addEventListener() {} };
  globalThis.document = {createElement: () => new Node()};
  const part = {properties: {autoRenew: {anyOf: [{type: "boolean"}, {type: "null"}], default: null}, force: {type: "boolean", default: false}}};
  const form = (value) => schema.group(part, part, "", value, {});
  const chosen = form(undefined);
  chosen.node.children[0].children[1].value = "true";
  results.unset = [form(undefined), form({autoRenew: false, force: true}), chosen].map((one) => one.read());
}
results.groups = [{selector: {os: "linux", arch: "", tools: ["git"], labels: [], where: "x=1"}, pinnedMembers: ["a"]}, {}].map(edge.groupWords);
{
  const told = servers.serverFigures('# HELP x\nfleetplane_store_resources 57.0\nfleetplane_store_queued 3.0\nfleetplane_sessions_open{domain="edge"} 2.0\nfleetplane_sessions_refused_total{domain="edge"} 1.0\nfleetplane_reconcile_queued{controller="instances/groups"} 4.0\nfleetplane_reconcile_leases_lost_total{controller="instances/groups"} 1.0\nother 1\n');
  results.server = [told.database[0], told.database[2], told.sessions, told.controllers];
}
results.charts = [{title: "Sent", unit: "B/s", full: null, high: null, points: [{at: "1970-01-01T00:01:00Z", average: 2500}]}, {title: "Processor", unit: "%", full: 100, high: 90, points: []}, {title: "Drops", unit: "/s", full: null, high: null, points: []}]
  .map(observed.chartParts).map((one) => [one.title, one.unit, one.points, one.most ?? null, one.threshold ?? null]);
{
  const nowMs = Date.parse("2026-01-02T00:01:00Z");
  const one = (name, state, more = {}) => ({metadata: {name}, status: {state, writable: state === "active", fresh: true, silentSince: null, lagGroups: 0, lagSeconds: 0, bus: {kind: "none", connected: false, trouble: ""}, ...more}});
  const silent = (at) => ({fresh: false, silentSince: at, lagSeconds: null});
  results.servers = [
    [one("a", "active")], [one("a", "active", {writable: false})], [one("a", "active"), one("b", "standby")],
    [one("a", "active"), one("b", "standby", {lagGroups: 340, lagSeconds: 12.34}), one("c", "standby", {lagGroups: 1, lagSeconds: 0.4})],
    [one("a", "gone", silent("2026-01-02T00:00:30Z")), one("b", "standby")], [one("a", "active"), one("b", "gone", silent("2025-12-31T00:00:00Z")), one("c", "gone", silent(null))],
    [one("a", "active", silent("2026-01-02T00:00:54Z")), one("b", "standby")],
    [one("a", "active", {bus: {kind: "nats", connected: true, trouble: ""}}), one("b", "standby", {bus: {kind: "nats", connected: false, trouble: "refused"}})],
  ].map((all) => servers.serversWords(all, nowMs));
  results.buses = [{kind: "none", connected: false, trouble: ""}, {kind: "nats", connected: true, trouble: ""}, {kind: "nats", connected: false, trouble: "refused"}].map(servers.busWords);
  results.serverLags = [one("a", "standby", {lagGroups: 1, lagSeconds: null}), one("a", "gone")].map((all) => servers.serverLag(all.status));
}
{
  const facts = completion.factsOf([{role: "web", env: "test"}, {role: "db", zone: ""}, {tags: ["a", "b"]}]);
  const texts = (text, ...more) => completion.suggestions(text, facts, ...more).map((one) => one.insert);
  results.completed = [texts(""), texts("ro"), texts("role"), texts("role="), texts("role!=w"), texts("env=test, ta"), texts("role in (web, d"), texts("!z"), texts("role=web"), texts("a", ["all", "@a"]), texts("tags=a ro", ["all"], ", ")];
}
results.fieldNames = ["objects[0].spec.programs[1].command", "objects[0].spec.name", "master_node_id", "spec", ""].map(refusals.fieldNames);
{
  const root = {$defs: {Part: {type: "object", properties: {a: {type: "string"}}}, State: {enum: ["on", "off"]}}};
  const shapes = [{type: "string"}, {anyOf: [{type: "integer"}, {type: "null"}]}, {type: "array", items: {type: "string"}}, {type: "array", items: {$ref: "#/$defs/Part"}}, {$ref: "#/$defs/Part"}, {$ref: "#/$defs/State"},
    {type: "object", additionalProperties: {type: "string"}}, {anyOf: [{type: "string"}, {type: "integer"}]}, {type: "object", additionalProperties: {}}, {type: "boolean"}];
  results.shapes = shapes.map((one) => schema.shapeOf(root, one)).map(({type, nullable}) => type + (nullable ? "?" : ""));
  results.pairs = schema.pairsOf("A=1\n\nB = x=y");
  results.noPair = (() => { try { schema.pairsOf("=x"); return ""; } catch (error) { return error.message; } })();
}
results.firsts = ["access-lists", "accounts", "agent-versions", "boards", "certificates", "clusters", "edge-configs", "edge-groups", "edge-nodes", "freezes", "gpus", "groups", "instances", "pins", "providers", "releases", "rollout-policies", "rollouts", "runs", "tokens"].map(first.firstCommand);
results.stale = [{status: {state: "offline", lastSeenAt: "2026-01-01T00:00:00Z"}}, {status: {state: "online", lastSeenAt: "2026-01-01T00:00:00Z"}}, {status: {state: "Unheard"}}, null].map(m.staleSince);
process.stdout.write(JSON.stringify(results));

// What the page knows and how it follows from the server's events. No document, no network, no clock.

export { EventReader, age, retryMs } from "./live.mjs";

export const ROWS_LIMIT = 500; // More rows than a person reads; the filters find the others.
const GONE = new Set(["deleting", "deleted"]);

export const nothing = () => ({
  groups: new Map(),
  instances: new Map(),
  errors: [],
  mark: "",
  synced: false,
  skewMs: 0,
});

// The server's token, and the tenant for tokens that have none, from the part of the address after `#`,
// which browsers keep to themselves.
export const credentialsIn = (hash) => {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const token = (given.get("token") || "").trim();
  return token ? { token, tenant: (given.get("tenant") || "").trim() } : null;
};

// Takes one event in; a kind that this page does not know yet changes nothing.
export const apply = (known, { kind, data, mark }, nowMs) => {
  switch (kind) {
    case "reset": // A mark from before it would leave out what is void now.
      known.instances.clear();
      [known.mark, known.synced] = ["", false];
      break;
    case "instance":
      known.instances.set(data.id, data);
      break;
    case "instance_deleted":
      known.instances.delete(data.id);
      break;
    case "health":
      for (const [id, word] of Object.entries(data)) {
        const instance = known.instances.get(id);
        if (instance) known.instances.set(id, { ...instance, health: word });
      }
      break;
    case "groups":
      known.groups = new Map(data.map((group) => [group.name, group]));
      break;
    case "group":
      known.groups.set(data.name, data);
      break;
    case "group_deleted":
      known.groups.delete(data.name);
      break;
    case "errors":
      known.errors = data;
      break;
    case "now":
      [known.mark, known.synced] = [mark, true];
      known.skewMs = Date.parse(data.at) - nowMs;
      break;
  }
  return known;
};

const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);

export const groupsShown = (known) => [...known.groups.values()].sort((one, other) => compare(one.name, other.name));

// The rows that fit the filters, by group and then oldest first; `total` counts also those beyond the limit.
export const instancesShown = (known, { group = "", state = "", text = "", gone = false } = {}) => {
  const wanted = text.trim().toLowerCase();
  const found = [...known.instances.values()].filter(
    (one) =>
      (gone || state || !GONE.has(one.state)) &&
      (!group || one.group === group) &&
      (!state || one.state === state) &&
      (!wanted || `${one.id} ${one.hostname} ${one.provider_id} ${one.last_error}`.toLowerCase().includes(wanted)),
  );
  found.sort(
    (one, other) =>
      compare(one.group, other.group) || compare(one.created_at, other.created_at) || compare(one.id, other.id),
  );
  return { rows: found.slice(0, ROWS_LIMIT), total: found.length };
};

export const frozenWords = (frozen) =>
  frozen ? `${frozen.reason} (${frozen.actor}${frozen.until ? `, until ${frozen.until}` : ""})` : "";

// What to tell a person who asks why, as lines of text.
export const whyLines = (explained, instance) => {
  const lines = [];
  if (instance && instance.reason) {
    const until = instance.delete_at ? `; it goes at ${instance.delete_at} at the latest` : "";
    lines.push(`It is on its way out: ${instance.reason}${until}.`);
  }
  if (instance && instance.last_error) lines.push(`The last thing tried with it failed: ${instance.last_error}`);
  for (const [name, problem] of Object.entries((instance && instance.file_errors) || {}))
    lines.push(`Its file ${name} is not well: ${problem}`);
  for (const finding of explained.findings) {
    if (finding.last_error) lines.push(`${finding.failures} passes failed in a row: ${finding.last_error}`);
    for (const reason of finding.reasons)
      lines.push(`${reason.subject ? `${reason.subject}: ` : ""}${reason.message} [${reason.code}]`);
  }
  if (!lines.length)
    lines.push(explained.findings.length ? "Everything is as it should be." : "Nobody has looked at it yet.");
  return lines;
};

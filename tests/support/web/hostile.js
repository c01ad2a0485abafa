// Everything that people and machines name is named as by somebody who means ill: what comes in is given `hostile.text`, and what goes out is
// freed of it, so that pages work as ever. What grows without end is left alone where the text is long.
(() => {
  const { text, isLong } = globalThis.hostile;
  const own = new Set(["name", "displayName", "display_name", ...(isLong ? [] : ["description", "message", "reason", "reasons", "error", "lastError", "text", "hostname", "model", "osVersion",
    "nginx", "serverName", "address", "command", "args", "tags", "actor", "startedBy", "createdBy", "created_by", "by", "requested_by", "uri", "user_agent", "remote_addr", "host", "values", "heldBy", "subject", "detail", "hint"])]);
  const isWord = (value) => typeof value === "string" && value !== "" && !/^\d{4}-\d\d-\d\dT/.test(value);
  const spoilt = (value, key) => {
    if (Array.isArray(value)) return value.map((one) => spoilt(one, key));
    if (value === null || typeof value !== "object") return own.has(key) && isWord(value) ? value + text : value;
    const name = value.object?.name;
    return Object.fromEntries(Object.entries(value).map(([inner, one]) => {
      if (inner === "cells") return [inner, one.map((cell) => (cell === name ? cell + text : cell))];
      if (inner === "labels" && !isLong) return [inner, Object.fromEntries(Object.entries(one).map(([label, of]) => [label, of + text]))];
      return [inner, spoilt(one, key === "labels" ? key : inner)];
    }));
  };
  const left = new Set(["workspaces", "organizations", ...(isLong ? ["events", "audit-entries", "runs"] : [])]); // those two are parts of scopes
  const isLeft = (data) => left.has(data?.object?.resource);
  const forms = [encodeURIComponent(text), new URLSearchParams({ text }).toString().slice(5), JSON.stringify(text).slice(1, -1), text];
  const freed = (sent) => forms.reduce((rest, form) => rest.replaceAll(form, ""), sent);
  const real = globalThis.fetch.bind(globalThis);
  globalThis.fetch = async (url, more = {}) => {
    const found = await real(freed(String(url)), typeof more.body === "string" ? { ...more, body: freed(more.body) } : more);
    const type = found.headers.get("content-type") ?? "";
    const how = { status: found.status, headers: found.headers };
    if (type.includes("json") && !/\/apis\/v1$/.test(String(url))) return new Response(JSON.stringify(spoilt(await found.json(), "")), how);
    if (!type.includes("event-stream") || !found.body) return found;
    let rest = "";
    const lines = new TransformStream({ transform: (piece, to) => {
      const whole = (rest + piece).split("\n");
      rest = whole.pop();
      for (const line of whole) {
        const data = line.startsWith("data: ") ? JSON.parse(line.slice(6)) : null;
        to.enqueue(`${data === null || isLeft(data) ? line : `data: ${JSON.stringify(spoilt(data, ""))}`}\n`);
      }
    } });
    return new Response(found.body.pipeThrough(new TextDecoderStream()).pipeThrough(lines).pipeThrough(new TextEncoderStream()), how);
  };
  addEventListener("securitypolicyviolation", (event) => { globalThis.violated = `${event.violatedDirective} ${event.blockedURI} ${event.sample}`; });
})();

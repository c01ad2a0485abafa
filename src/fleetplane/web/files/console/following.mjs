// The one stream of changes: begun with what there is, gone on with after a cut, by itself.

import { Problem, address, answer } from "./api.mjs";
import { apply, beginSnapshot } from "./model.mjs";
import { EventReader, retryMs } from "../live.mjs";

const STALLED_MS = 40_000; // The server says something at least every 15 s.
const REFUSED = new Set([401, 403]); // Trying again would not help.

/** @typedef {import("./model.mjs").World} World */

/**
 * Follow until the signal aborts or the server refuses.
 * @param {World} world
 * @param {AbortSignal} signal
 * @param {{changed: () => void, state: (word: string, why?: string) => void, refused: (problem: Problem) => void}} tell
 */
export const follow = async (world, signal, tell) => {
  for (let attempt = 0; !signal.aborted; ) {
    if (!world.synced) tell.state("connecting");
    const before = world.revision;
    let why = "the server ended the connection";
    try {
      await followOnce(world, signal, tell);
    } catch (error) {
      if (error instanceof Problem && REFUSED.has(error.status)) return tell.refused(error);
      why = error instanceof Error ? error.message : String(error);
    }
    if (signal.aborted) return;
    attempt = world.revision === before ? attempt + 1 : 0;
    tell.state("cut", why);
    await pause(retryMs(attempt, Math.random()), signal);
  }
};

/**
 * One connection, from its first byte to its end.
 * @param {World} world
 * @param {AbortSignal} signal
 * @param {{changed: () => void, state: (word: string, why?: string) => void}} tell
 */
const followOnce = async (world, signal, tell) => {
  const stalled = new AbortController();
  const either = AbortSignal.any([signal, stalled.signal]);
  let timer = setTimeout(() => stalled.abort(), STALLED_MS);
  try {
    if (!world.revision) beginSnapshot(world);
    const url = address("/watch", { of: "*", form: "full", measured: "1", after: world.revision });
    const found = await answer(url, { headers: { Accept: "text/event-stream" }, signal: either });
    if (!found.body) throw new Error("the server sent nothing");
    world.measured += 1; // While nobody listened, something may have come.
    if (world.revision) tell.state("live");
    const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done || signal.aborted) return;
      clearTimeout(timer);
      timer = setTimeout(() => stalled.abort(), STALLED_MS);
      let ended = false;
      for (const event of events.take(value)) ended = apply(world, event, Date.now()) || ended;
      if (world.synced && world.revision) tell.state("live");
      tell.changed();
      if (ended) return;
    }
  } finally {
    clearTimeout(timer);
    stalled.abort();
  }
};

/**
 * @param {number} ms
 * @param {AbortSignal} signal
 */
const pause = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); done(undefined); }, { once: true });
  });

// Streams beside the one of everything: a run, a log. Each goes on after a cut until it is over or its page closes.

import { Problem, answer } from "./api.mjs";
import { EventReader, retryMs } from "../live.mjs";

/**
 * Follow server-sent events until `take` returns true, the server refuses, or the signal aborts.
 * @param {string} url
 * @param {AbortSignal} signal
 * @param {(event: {kind: string, data: any, mark: string}) => boolean | void} take whether that was the last
 * @param {Record<string, string>} [headers]
 * @param {() => void} [begun] told at each connection that begins anew and not after an event
 */
export const followEvents = async (url, signal, take, headers = {}, begun = () => {}) => {
  let last = "";
  for (let attempt = 0; !signal.aborted; attempt += 1) {
    try {
      /** @type {Record<string, string>} */
      const resumed = last ? { "Last-Event-ID": last } : {};
      const found = await answer(url, { headers: { Accept: "text/event-stream", ...headers, ...resumed }, signal });
      if (!found.body) return;
      if (!last) begun();
      const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
      const events = new EventReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        for (const event of events.take(value)) {
          attempt = 0;
          if (event.mark) last = event.mark;
          if (take(event)) return void reader.cancel();
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status < 500) throw error;
    }
    await new Promise((done) => setTimeout(done, retryMs(attempt, Math.random())));
  }
};

// Calls to the server: the key, JSON, and server-sent events.

import { byId } from "./dom.js";

const KEY = "twostroke.key"; // in this tab's storage, gone with the tab
let key = sessionStorage.getItem(KEY);
let asking = null;

/** A response of the server. Asks for the key where it is missing or wrong, and tries again. */
export async function call(path, { body, signal, headers = {} } = {}) {
  for (;;) {
    const used = key;
    const sent = { ...headers, ...(used ? { authorization: `Bearer ${used}` } : {}) };
    if (body !== undefined) sent["content-type"] = "application/json";
    const options = { headers: sent, signal, credentials: "omit", cache: "no-store" };
    const posted = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    const response = await fetch(path, { ...options, ...posted });
    if (response.status !== 401) return response;
    if (key === used) await askKey(used);
  }
}

/** The JSON of a response. Throws the server's own message. */
export async function json(path, options) {
  const response = await call(path, options);
  if (!response.ok) throw new Error(await reason(response));
  return response.json();
}

/** The query of a route without a body, which names one of several models. */
export const ofModel = (model) => (model === undefined ? "" : `?model=${encodeURIComponent(model)}`);

/** Why a call was refused, in the server's words. */
export async function reason(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The events of a stream: {event, data}, with data as JSON; the marker of OpenAI's streams is left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s)));
        if (fields.data !== "[DONE]") yield { event: fields.event, data: JSON.parse(fields.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Ask the user for the key; all calls that wait for it wait together. */
function askKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const input = byId("key");
    byId("key-wrong").hidden = !wrong;
    input.value = "";
    dialog.onclose = () => asking && dialog.showModal(); // Esc closes it, and nothing works without a key
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      key = input.value.trim();
      sessionStorage.setItem(KEY, key);
      asking = null;
      dialog.close();
      resolve();
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}

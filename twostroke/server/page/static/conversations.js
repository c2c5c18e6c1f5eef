// Conversations, kept in this browser and nowhere else.

const PREFIX = "twostroke.api.conversation.";
const SETTINGS = "twostroke.settings";

export const DEFAULTS = {
  system: "",
  method: "plain",
  parameters: {}, // of each method
  compare: false,
  other: "plain",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  tools: "",
  format: "text",
  schema: "",
  extra: "",
};

/** The settings of the conversation before, for a new one. */
export function lastSettings() {
  return { ...DEFAULTS, ...read(SETTINGS) };
}

export function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", changed: Date.now(), settings: lastSettings(), turns: [] };
}

/** {id, title, changed} of all conversations, the newest first. */
export function listed() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const all = keys.map((key) => read(key)).filter(Boolean);
  return all.map(({ id, title, changed }) => ({ id, title, changed })).sort((a, b) => b.changed - a.changed);
}

export function load(id) {
  return read(PREFIX + id);
}

/** Keep a conversation. Returns false where the browser has no room for it, or keeps nothing. */
export function save(conversation) {
  conversation.changed = Date.now();
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(conversation.settings));
    if (conversation.turns.length) localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation, kept));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Tokens with their alternatives take much room: they last as long as the page does. */
function kept(name, value) {
  return name === "tokens" || name === "cache" ? undefined : value;
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

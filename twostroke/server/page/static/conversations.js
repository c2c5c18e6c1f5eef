// Conversations, kept in this browser and nowhere else. Several tabs may change one: each saves what it has changed.

import { going } from "./ask.js";
import { fromMarkdown } from "./transcript.js";
import { add, newId } from "./tree.js";

const PREFIX = "twostroke.api.conversation.";
const SETTINGS = "twostroke.settings";
const OWN = ["title", "settings", "at"]; // what is saved of a conversation besides its turns

export const DEFAULTS = {
  model: "", // of several; the server's first one where none is chosen
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

const bases = new WeakMap(); // of each conversation, what was stored when it was last read or saved
const seen = new Map(); // of each key, the text that was read last, and its conversation

/** A new conversation, with the settings that were changed last. */
export function fresh() {
  return { id: newId(), title: "", settings: structuredClone({ ...DEFAULTS, ...read(SETTINGS) }), turns: {}, at: null };
}

/** All conversations, the one that was changed last first. */
export function listed() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map(stored).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/** Those that have all words of a query in their titles and texts. */
export function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return listed().filter(({ title, turns }) => {
    const text = [title, ...Object.values(turns).map(({ content }) => content)].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** A conversation; null if it is not there, or not any more. */
export function load(id) {
  const found = stored(PREFIX + id);
  if (!found) return null;
  const conversation = structuredClone(found);
  bases.set(conversation, structuredClone(found));
  return conversation;
}

/** Keep what was changed of a conversation. Returns false where the browser has no room for it, or keeps nothing. */
export function save(conversation) {
  if (!Object.keys(conversation.turns).length) return true;
  const key = PREFIX + conversation.id;
  update(conversation);
  const base = bases.get(conversation);
  if (base && localStorage.getItem(key) !== null && [...OWN, "turns"].every((name) => same(base[name], conversation[name]))) return true;
  try {
    localStorage.setItem(key, JSON.stringify({ ...conversation, changed: Date.now() }, kept));
  } catch {
    return false;
  }
  bases.set(conversation, structuredClone(stored(key)));
  return true;
}

/** Take over what other tabs have saved of a conversation. Returns whether there was anything. */
export function update(conversation) {
  const theirs = stored(PREFIX + conversation.id);
  const base = bases.get(conversation);
  if (!theirs || same(theirs, base)) return false;
  const unseen = conversation.at !== null && !theirs.turns[conversation.at]; // they saved before they saw where this tab is
  const mine = OWN.filter((name) => (base && !same(conversation[name], base[name])) || (name === "at" && unseen));
  const { settings } = conversation; // a form may be bound to it
  for (const name of OWN) if (!mine.includes(name)) conversation[name] = structuredClone(theirs[name]);
  conversation.settings = Object.assign(settings, conversation.settings);
  for (const [id, turn] of Object.entries(theirs.turns)) {
    const known = conversation.turns[id];
    if (!known) conversation.turns[id] = structuredClone(turn);
    else if (same(known, base?.turns[id]) && !same(known, turn) && !isOlder(turn, known)) Object.assign(known, structuredClone(turn));
  }
  bases.set(conversation, structuredClone(theirs));
  return true;
}

/** Whether what is stored has less than the conversation: two tabs that save at the same time do not see each other. */
export function lacks({ id, turns }) {
  const theirs = stored(PREFIX + id)?.turns;
  return theirs !== undefined && Object.values(turns).some((turn) => !theirs[turn.id] || isOlder(theirs[turn.id], turn));
}

/** Whether a turn is from before the end of the same answer. */
const isOlder = (turn, known) => turn.name === known.name && going(turn) && !going(known);

export function keepSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // A browser that keeps nothing: a new conversation has the usual settings.
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

/** Call `changed(id)` when another tab has changed or removed a conversation. */
export function listen(changed) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) changed(key?.slice(PREFIX.length));
  });
}

/** Conversations from a file that was exported, or of one of them; those that are there already get its turns. One as
 * Markdown is another conversation each time. */
export function importAll(text) {
  const written = fromMarkdown(text, fresh());
  const found = written ? [written] : [JSON.parse(text)].flat().map(upgraded);
  if (!found.every(isConversation)) throw new Error("this file holds no conversations that were exported here");
  return found.map((one) => {
    const conversation = load(one.id) ?? { ...fresh(), id: one.id };
    const { title, settings, at, turns } = one;
    Object.assign(conversation, { title, settings: { ...DEFAULTS, ...settings }, at, turns: { ...conversation.turns, ...turns } });
    if (!save(conversation)) throw new Error("the browser has no room for it");
    return conversation;
  });
}

/** Whether a value can be shown: every turn has its texts, and comes after the one before it. */
function isConversation(value) {
  const known = new Set([null]);
  const texts = (...all) => all.every((text) => typeof text === "string");
  const isCall = (call) => texts(call?.id, call?.name, call?.arguments);
  const isTurn = (turn) => {
    const { role, content, thought = "", parent, calls, state } = turn ?? {};
    const fine = texts(content, thought) && known.has(parent) && ["user", "assistant", "tool"].includes(role);
    known.add(turn?.id);
    return fine && (role !== "assistant" || (texts(state) && Array.isArray(calls) && calls.every(isCall)));
  };
  const turns = Object.entries(value?.turns ?? { none: null });
  return texts(value?.id, value?.title) && turns.every(([id, turn]) => id === turn?.id && isTurn(turn)) && known.has(value.at);
}

/** As it is kept: tokens with their alternatives take much room, and last as long as the page does. */
export const asJson = (value, indent) => JSON.stringify(value, kept, indent);
const kept = (name, value) => (["tokens", "cache", "progress"].includes(name) ? undefined : value);
const same = (one, other) => asJson(one) === asJson(other);

function stored(key) {
  const text = localStorage.getItem(key);
  if (text === null) return null;
  if (seen.get(key)?.text !== text) {
    const conversation = upgraded(read(key));
    const whole = isConversation(conversation) && { ...conversation, settings: { ...DEFAULTS, ...conversation.settings } };
    seen.set(key, { text, conversation: whole || null });
  }
  return seen.get(key).conversation;
}

/** Until November 2026, a conversation was a list of turns, and each answer a list of one or two. */
function upgraded(conversation) {
  if (!Array.isArray(conversation?.turns)) return conversation;
  const made = { ...conversation, turns: {}, at: null };
  conversation.turns.forEach((turn, i) => {
    const { answers = [turn], chosen = 0, id: call } = turn;
    const pair = answers.length > 1 ? `p${i}` : undefined;
    const parent = made.at;
    const added = answers.map((one, j) => add(made, { ...one, id: `t${i}-${j}`, call, pair, role: turn.role }, parent));
    made.at = added[chosen].id;
  });
  return made;
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

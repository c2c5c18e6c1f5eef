// The page: the list of conversations, the one that is open, its settings, and the engine beside it.

import { json, ofModel } from "./api.js";
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import * as conversations from "./conversations.js";
import { announce, button, byId, download, el, whenStill } from "./dom.js";
import { forgetColours } from "./draw.js";
import { EnginePanel } from "./engine.js";
import { bind, bindModel, modelOf, offer, offerModels } from "./settings.js";
import { asMarkdown } from "./transcript.js";

const DRAFTS = "twostroke.drafts"; // in this tab's storage
const PANELS = { list: "show-list", engine: "show-engine", settings: "show-settings" };
const narrow = matchMedia("(max-width: 800px)");

const chats = new Map(); // those that are answered, and the one on the screen
let chat = null;
let attachments = null;
let panel = null;
let connected = false; // to the engine that the panel watches

function open(conversation) {
  if (chat) {
    keepDraft();
    chat.visible = false;
    if (!chat.going) chats.delete(chat.conversation.id);
  }
  chat = chats.get(conversation.id) ?? new Chat(conversation, showList);
  chats.set(conversation.id, chat);
  chat.open();
  bindSettings();
  if (panel && panel.model !== modelOf(conversation.settings)) turnTo();
  byId("ask").value = drafts()[draftName()] ?? "";
  history.replaceState(null, "", location.pathname);
  showList();
}

/** A conversation by its id, also one that another tab may have removed. */
function openKept(id) {
  const found = chats.get(id)?.conversation ?? conversations.load(id);
  if (found) open(found);
  else announce("Another tab has deleted this conversation");
  if (narrow.matches) show("list", false);
  showList();
}

function bindSettings() {
  const { settings } = chat.conversation;
  const keep = () => {
    conversations.keepSettings(settings);
    chat.keep();
  };
  bind(settings, keep);
  bindModel(settings, () => {
    keep();
    turnTo(true);
  });
}

function showList() {
  whenStill(showList, drawList);
}

function drawList() {
  const query = byId("search").value.trim();
  const found = query ? conversations.search(query) : conversations.listed();
  byId("list").replaceChildren(...found.map(item));
  byId("none-found").hidden = !query || found.length > 0;
  if (chat && Object.keys(chat.conversation.turns).length) history.replaceState(null, "", `#${chat.conversation.id}`);
}

function item({ id, title }) {
  const current = id === chat?.conversation.id;
  const drop = () => {
    if (!confirm(`Delete "${title}"?`)) return;
    chats.get(id)?.stop();
    conversations.remove(id);
    if (current) open(conversations.fresh());
    else showList();
  };
  const rename = () => {
    const text = prompt("A new name", title)?.trim();
    const conversation = chats.get(id)?.conversation ?? conversations.load(id);
    if (!text || !conversation) return;
    conversation.title = text;
    conversations.save(conversation);
    showList();
  };
  return el(
    "li",
    {},
    button(title, () => openKept(id), { class: "title", "aria-current": current ? "true" : null, dir: "auto" }),
    button("✎", rename, { "aria-label": `Rename ${title}`, class: "small" }),
    button("×", drop, { "aria-label": `Delete ${title}`, class: "small drop" }),
  );
}

function exchange() {
  byId("export").addEventListener("click", () => download("conversations.json", conversations.asJson(conversations.listed(), 1)));
  byId("export-this").addEventListener("click", () => {
    const name = chat.conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";
    download(`${name}.md`, asMarkdown(chat.conversation));
  });
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async ({ target }) => {
    byId("import-error").hidden = true;
    try {
      for (const file of target.files) conversations.importAll(await file.text());
    } catch (error) {
      byId("import-error").textContent = `Nothing was imported: ${error.message}.`;
      byId("import-error").hidden = false;
    }
    target.value = "";
    showList();
  });
  byId("search").addEventListener("input", showList);
  conversations.listen((id) => {
    for (const one of chats.values()) {
      if ((id === undefined || one.conversation.id === id) && one.refresh() && one === chat) bindSettings();
    }
    showList();
  });
}

function show(panel, shown) {
  document.body.classList.toggle(`with-${panel}`, shown);
  byId(PANELS[panel]).setAttribute("aria-expanded", String(shown));
  try {
    localStorage.setItem(`twostroke.shows-${panel}`, shown ? "1" : "");
  } catch {
    // A browser that keeps nothing: the panel is as usual next time.
  }
}

function panels() {
  const shown = (panel) => document.body.classList.contains(`with-${panel}`);
  for (const [panel, control] of Object.entries(PANELS)) {
    const usual = { list: innerWidth > 1100, engine: innerWidth > 800, settings: false }[panel];
    show(panel, !(narrow.matches && panel !== "settings") && (localStorage.getItem(`twostroke.shows-${panel}`) ?? (usual ? "1" : "")) === "1");
    byId(control).addEventListener("click", () => {
      if (narrow.matches) for (const other of Object.keys(PANELS)) if (other !== panel) show(other, false);
      show(panel, !shown(panel));
    });
    document.querySelector(`[data-closes="${panel}"]`).addEventListener("click", () => {
      show(panel, false);
      byId(control).focus();
    });
  }
}

function themes() {
  const set = (theme) => {
    document.documentElement.dataset.theme = localStorage["twostroke.theme"] = theme;
    byId("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[theme];
    forgetColours();
  };
  set(localStorage["twostroke.theme"] ?? "auto");
  byId("theme").addEventListener("click", () => {
    set({ auto: "dark", dark: "light", light: "auto" }[document.documentElement.dataset.theme]);
  });
}

const draftName = () => (Object.keys(chat.conversation.turns).length ? chat.conversation.id : "new");

function drafts() {
  return JSON.parse(sessionStorage.getItem(DRAFTS) ?? "{}");
}

/** A question that is not asked yet stays with its conversation, also when the page is loaded again. */
function keepDraft() {
  const { [draftName()]: _, ...others } = drafts();
  const all = byId("ask").value ? { ...others, [draftName()]: byId("ask").value } : others;
  if (Object.keys(all).length) sessionStorage.setItem(DRAFTS, JSON.stringify(all));
  else sessionStorage.removeItem(DRAFTS);
}

function composer() {
  const input = byId("ask");
  attachments = new Attachments(() => modelOf(chat.conversation.settings));
  const send = () => {
    if (!(input.value.trim() || attachments.files.length) || chat.refused()) return;
    const text = attachments.take(input.value);
    input.value = "";
    keepDraft();
    chat.say(text);
  };
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("input", keepDraft);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => chat.stop());
  byId("new").addEventListener("click", begin);
}

function begin() {
  open(conversations.fresh());
  if (narrow.matches) show("list", false);
  byId("ask").focus();
}

function find() {
  show("list", true);
  byId("search").focus();
}

function editLast() {
  [...document.querySelectorAll(".user button")].findLast((one) => one.textContent === "Edit")?.click();
}

function escape() {
  if (chat.going) chat.stop();
  else if (narrow.matches) for (const panel of Object.keys(PANELS)) show(panel, false);
}

const command = (letter) => (event) => (event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === letter;
const typing = ({ target }) => target.matches("input, textarea, select");
const plainKey = (key) => (event) => event.key === key && !typing(event) && !event.ctrlKey && !event.metaKey;
const SHORTCUTS = [
  ["Enter", "send the question; Shift+Enter begins a new line"],
  ["Esc", "stop the answer, or close the panels of a phone", (event) => event.key === "Escape", escape],
  ["↑", "change the last question, while the new one is empty", (event) => event.key === "ArrowUp" && event.target === byId("ask") && !byId("ask").value, editLast],
  ["/", "go to the question", plainKey("/"), () => byId("ask").focus()],
  ["Ctrl+Shift+O", "begin a new conversation", command("o"), begin],
  ["Ctrl+Shift+F", "search conversations", command("f"), find],
  ["Ctrl+Shift+S", "settings", command("s"), () => byId("show-settings").click()],
  ["Ctrl+Shift+E", "the engine", command("e"), () => byId("show-engine").click()],
  ["?", "this list", plainKey("?"), () => byId("shortcuts").showModal()],
];

function shortcuts() {
  byId("shortcut-list").replaceChildren(...SHORTCUTS.flatMap(([keys, text]) => [el("dt", {}, el("kbd", {}, keys)), el("dd", {}, text)]));
  byId("show-shortcuts").addEventListener("click", () => byId("shortcuts").showModal());
  addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const [, , , action] = SHORTCUTS.find(([, , fits]) => fits?.(event)) ?? [];
    if (!action) return;
    if (event.key !== "Escape") event.preventDefault();
    action();
  });
}

/** What the server offers; asked for again when it comes back, since it may be another one. */
async function meet(load = false) {
  const { data } = await json("/v1/models");
  offerModels(data.map(({ id }) => id));
  bindSettings();
  const model = modelOf(chat.conversation.settings);
  panel.watch(model);
  const { id: name, max_model_len: room, status } = data.find(({ id }) => id === model) ?? (model ? {} : data[0]) ?? {};
  if (!name) return;
  byId("model").textContent = name;
  document.title = `${name} · Twostroke`;
  Chat.room = room;
  chat.showContext();
  const there = !status || status.value === "loaded";
  if (!there && !connected) byId("link").textContent = "The model is loaded when it is asked";
  if (!there && !load) return;
  const { methods } = await json(`/methods${ofModel(model)}`);
  if (model !== modelOf(chat.conversation.settings)) return; // another one has been picked since
  offer(methods);
  bindSettings();
}

/** The conversation's model is another one than before: one that was picked is loaded, for the question that will come. */
function turnTo(load = false) {
  connected = false;
  meet(load).catch((error) => announce(error.message));
}

function linked(now, why = "The server cannot be reached") {
  connected = now;
  byId("link").textContent = connected ? "Connected" : `${why}; trying again`;
  byId("link").classList.toggle("gone", !connected);
  if (connected) meet().catch((error) => announce(error.message));
}

addEventListener("pagehide", () => {
  for (const one of chats.values()) one.leave();
});
themes();
panels();
exchange();
composer();
shortcuts();
open(conversations.load(location.hash.slice(1)) ?? conversations.fresh());
panel = new EnginePanel((...found) => chats.forEach((one) => one.picture(...found)), linked);
turnTo();
byId("ask").focus();

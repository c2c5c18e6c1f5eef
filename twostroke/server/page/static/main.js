// The page: the list of conversations, the one that is open, its settings, and the engine beside it.

import { json } from "./api.js";
import { Chat } from "./chat.js";
import { fresh, listed, load, remove } from "./conversations.js";
import { announce, button, byId, el } from "./dom.js";
import { forgetColours } from "./draw.js";
import { EnginePanel } from "./engine.js";
import { bind, offer } from "./settings.js";

let chat = null;

function open(conversation) {
  chat?.close();
  chat = new Chat(conversation, showList);
  bind(conversation.settings, () => chat.keep());
  location.hash = conversation.turns.length ? conversation.id : "";
  showList();
}

function showList() {
  const items = listed().map(({ id, title }) => {
    const current = id === chat.conversation.id;
    const drop = () => {
      if (!confirm(`Delete "${title}"?`)) return;
      remove(id);
      if (current) open(fresh());
      else showList();
    };
    return el(
      "li",
      {},
      button(title, () => open(load(id)), { class: "title", "aria-current": current ? "true" : null, dir: "auto" }),
      button("×", drop, { "aria-label": `Delete ${title}`, class: "drop" }),
    );
  });
  byId("list").replaceChildren(...items);
  if (chat.conversation.turns.length) history.replaceState(null, "", `#${chat.conversation.id}`);
}

function toggle(control, panel, usual) {
  const name = `twostroke.${panel}`;
  const set = (shown) => {
    document.body.classList.toggle(`with-${panel}`, shown);
    byId(control).setAttribute("aria-expanded", String(shown));
    try {
      localStorage.setItem(name, shown ? "1" : "");
    } catch {
      // A browser that keeps nothing: the panel is as usual next time.
    }
  };
  byId(control).addEventListener("click", () => set(!document.body.classList.contains(`with-${panel}`)));
  set((localStorage.getItem(name) ?? (usual ? "1" : "")) === "1");
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

function composer() {
  const input = byId("ask");
  const send = () => {
    if (chat.going || !input.value.trim()) return;
    const text = input.value;
    input.value = "";
    chat.say(text);
  };
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  byId("stop").addEventListener("click", () => chat.stop());
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chat.going) chat.stop();
  });
  byId("new").addEventListener("click", () => {
    open(fresh());
    input.focus();
  });
}

/** What the server offers; asked for again when it comes back, since it may be another one. */
async function meet() {
  const { model, methods } = await json("/methods");
  byId("model").textContent = model;
  document.title = `${model} · Twostroke`;
  offer(methods);
  bind(chat.conversation.settings, () => chat.keep());
}

function linked(connected) {
  byId("link").textContent = connected ? "Connected" : "The server cannot be reached; trying again";
  byId("link").classList.toggle("gone", !connected);
  if (connected) meet().catch((error) => announce(error.message));
}

addEventListener("pagehide", () => {
  chat.stop();
  chat.keep();
});
themes();
toggle("show-list", "list", innerWidth > 1100);
toggle("show-engine", "engine", innerWidth > 800);
toggle("show-settings", "settings", false);
composer();
open(load(location.hash.slice(1)) ?? fresh());
new EnginePanel((cachesOf) => chat.picture(cachesOf), linked);
byId("ask").focus();

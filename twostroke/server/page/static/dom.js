// Elements without markup: what comes from a model or a server only ever becomes text nodes.

/** An element. Attributes that are functions listen to the event of that name; false and null are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  // Children first: with dir=auto, each one that comes later makes the browser look at all of them.
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  return node;
}

export const byId = (id) => document.getElementById(id);

export function button(label, click, attributes = {}) {
  return el("button", { type: "button", click, ...attributes }, ...[label].flat());
}

/** Say something to a screen reader, in the page's status line. */
export function announce(text) {
  byId("status").textContent = text;
}

/** A button that copies what `text()` returns, also where the clipboard needs a secure page and there is none. */
export function copyButton(text) {
  const node = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      const area = el("textarea", { class: "hidden" });
      area.value = text();
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    node.textContent = "Copied";
    announce("Copied");
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  return node;
}

/** Let the user save a text as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/octet-stream" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Run `action` once per frame at most, with the newest arguments. */
export function oncePerFrame(action) {
  let asked = null;
  return (...args) => {
    if (asked === null) requestAnimationFrame(() => { const now = asked; asked = null; action(...now); });
    asked = args;
  };
}

let waiting = null; // while a button is pressed: what is to be shown when it is let go, by what it is about

/** Show something now, or when the button that is pressed is let go: a press on what moves, or is made anew, is lost. */
export function whenStill(about, show) {
  if (waiting) waiting.set(about, show);
  else show();
}

function press(event) {
  if (event.target instanceof Element && event.target.closest("button")) waiting ??= new Map();
}

function letGo() {
  const shows = waiting?.values() ?? [];
  waiting = null;
  setTimeout(() => [...shows].forEach((show) => show())); // after what the click does
}

const pressing = { pointerdown: ({ button: which }) => which === 0, keydown: ({ key }) => key === " " };
const ending = { pointerup: () => true, pointercancel: () => true, keyup: pressing.keydown, blur: ({ target }) => target === window };
for (const [name, fits] of Object.entries(pressing)) addEventListener(name, (event) => fits(event) && press(event), true);
for (const [name, fits] of Object.entries(ending)) addEventListener(name, (event) => fits(event) && setTimeout(letGo), true);
addEventListener("click", letGo, true);

/** A token's text with its spaces and line ends made visible. */
export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

export const percent = (p) => `${(100 * p).toFixed(p > 0.1 ? 1 : 2)}%`;

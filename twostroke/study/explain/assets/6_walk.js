// The walk through the steps: buttons, arrow keys, and the address, so that the browser's way back works.
const steps = [
  ["tokens", "Tokens", tokensView],
  ["embedding", "Embedding", embeddingView],
  ["prefill", "Prefill", prefillView],
  ["attention", "Attention", attentionView],
  ["layers", "The answer forms", layersView],
  ["decode", "Decode", decodeView],
];
if (made.both_ways) steps.push(["cache", "Without the cache", waysView]);
if (made.method) steps.push(["method", `Technique: ${made.method.method}`, methodView]);

const main = document.getElementById("main");
const buttons = steps.map(([name, text], i) => element("button", { type: "button", on: { click: () => go(i) } }, `${i + 1} ${text}`));
document.getElementById("steps").append(...buttons.map((button) => element("li", {}, button)));
document.getElementById("tokens").append(...chips, element("span", { class: "token made", title: `sampled last, id ${lastToken.id}` }, visible(lastToken.text)));
document.getElementById("facts").textContent =
  `${made.model.name}: ${made.model.layers} layers, hidden ${made.model.hidden}, ${made.model.heads} heads, ${made.model.kv_heads} KV heads; ${made.model.backend}. Every number is the engine's own.`;

const current = () => Math.max(0, steps.findIndex(([name]) => `#${name}` === location.hash));
function go(index) {
  if (index >= 0 && index < steps.length) location.hash = steps[index][0];
}
function visit(entry) {
  const name = entry < made.tokens.length ? "attention" : "decode";
  if (name === "decode") chosen.step = entry - made.tokens.length;
  else if (exact) (seen.row = entry), (seen.column = entry);
  if (location.hash === `#${name}`) show(false);
  else location.hash = name;
}
function show(focus) {
  const at = current(), [, text, view] = steps[at];
  light();
  main.replaceChildren(element("h2", {}, text), ...view().filter((child) => child));
  buttons.forEach((button, i) => (i === at ? button.setAttribute("aria-current", "step") : button.removeAttribute("aria-current")));
  document.getElementById("place").textContent = `${at + 1} of ${steps.length}`;
  document.getElementById("previous").disabled = at === 0;
  document.getElementById("next").disabled = at === steps.length - 1;
  if (focus) main.focus({ preventScroll: true }), scrollTo(0, 0);
}
document.getElementById("previous").addEventListener("click", () => go(current() - 1));
document.getElementById("next").addEventListener("click", () => go(current() + 1));
addEventListener("hashchange", () => show(true));
addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("select, input, [role=grid]")) return;
  if (event.key === "ArrowLeft") go(current() - 1);
  if (event.key === "ArrowRight") go(current() + 1);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("main .panel")?.dispatchEvent(new Event("close"));
});
show(false);

// Makes elements. Texts of prompts and models only ever become text nodes.
const made = JSON.parse(document.getElementById("data").textContent);

function element(name, settings = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(settings)) {
    if (key === "on") for (const [event, action] of Object.entries(value)) node.addEventListener(event, action);
    else if (key === "style") for (const [property, size] of Object.entries(value)) node.style.setProperty(property, size);
    else if (key === "class") node.className = value;
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// What a reader can see of a token: spaces as they are, controls by name.
function visible(text) {
  if (text === "") return "∅";
  return text
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`)
    .replace(/^ | $/g, "␣");
}

const quoted = (text) => element("span", { class: "token" }, visible(text));
const count = (number) => Math.round(number).toLocaleString("en");
const plural = (size, name) => `${count(size)} ${name}${size === 1 ? "" : "s"}`;
const percent = (share) => share > 0 && share < 5e-5 ? "< 0.01 %" : `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`;
const ms = (seconds) => (seconds === null || seconds === undefined ? "–" : `${(1e3 * seconds).toFixed(1)} ms`);
const number = (value) => (value === null ? "−∞" : Math.abs(value) >= 1e-3 || value === 0 ? value.toFixed(4) : value.toExponential(2));

function amount(value, unit) {
  for (const [prefix, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (value >= size) return `${(value / size).toPrecision(3)} ${prefix}${unit}`;
  return `${count(value)} ${unit}`;
}

const bar = (share, kind = "") => element("span", { class: `bar ${kind}`, style: { width: `${12 * share}rem` } });

// A table. Columns whose names begin with > are numbers. `choose(index)` makes rows that can be chosen.
function table(columns, rows, choose, chosen) {
  const names = columns.map((name) => element("th", { scope: "col", class: name.startsWith(">") ? "number" : "" }, name.replace(/^>/, "")));
  const lines = rows.map((cells, index) => {
    const settings = {};
    if (choose) {
      settings.class = `choice${index === chosen ? " chosen" : ""}`;
      settings.tabindex = 0;
      settings["aria-selected"] = index === chosen;
      settings.on = {
        click: () => choose(index),
        keydown: (event) => {
          if (event.key === "Enter" || event.key === " ") choose(index), event.preventDefault();
        },
      };
    }
    return element("tr", settings, cells.map((cell, i) => element("td", { class: columns[i].startsWith(">") ? "number" : "" }, cell)));
  });
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, names)), element("tbody", {}, lines)));
}

const paragraph = (...children) => element("p", {}, ...children);
const soft = (...children) => element("p", { class: "soft" }, ...children);
const title = (text) => element("h3", {}, text);
const panel = (...children) => element("div", { class: "panel", role: "region", "aria-live": "polite" }, ...children);

// The candidates of a row, the sampled one marked.
function candidateTable(candidates, token) {
  const all = candidates.some((one) => one.id === token.id) ? candidates : [...candidates, token];
  const rows = all.map((one) => [quoted(one.text), count(one.id), percent(one.probability), bar(one.probability), one.id === token.id ? "sampled" : ""]);
  return table(["candidate", ">id", ">probability", "", ""], rows);
}

// Every entry's token: those of the prompt, then those that decode entered.
const entries = [...made.tokens, ...made.decode.map((step) => step.token_in)];
const lastToken = made.decode.length ? made.decode.at(-1).token_out : made.prefill.token;

// The strip of tokens at the top lights up what a view speaks of. A click leads to a token's row of attention, or to the
// step that entered it.
const chips = entries.map((token, i) =>
  element("button", { type: "button", class: `token${i >= made.tokens.length ? " made" : made.turn && (i < made.turn[0] || i >= made.turn[1]) ? " around" : ""}`, title: `entry ${token.index}, id ${token.id}`, on: { click: () => visit(i) } }, visible(token.text)));
function light(...indices) {
  chips.forEach((chip, i) => chip.classList.toggle("lit", indices.includes(i)));
}

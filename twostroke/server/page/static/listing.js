// A listing: its language, a button to copy it, and colours where its language is known.

import { copyButton, el } from "./dom.js";

const MAX_COLOURED = 20_000; // characters
const ALIASES = { "c++": "cpp", zsh: "bash", console: "bash", jsonc: "json", jsonl: "json", plaintext: "text" };
let languages = null; // once they are loaded
let loading = null;

function load() {
  loading ??= import("./vendor/highlight.js").then(({ default: prism }) => {
    languages = { of: (name) => prism.languages[name], tokenize: prism.tokenize };
  });
  return loading;
}

/** {node, write}: `write({code, language})` shows another state of the code, and follows its end while it grows. */
export function listing(block) {
  let shown = { code: "", language: "" };
  const name = el("span");
  const text = el("code");
  const box = el("pre", { tabindex: "0", role: "region" }, text);
  const write = ({ code, language }) => {
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    name.textContent = language || "text";
    box.setAttribute("aria-label", `Code, ${name.textContent}`);
    if (!paint(text, code, language)) {
      if (text.childNodes.length === 1 && text.firstChild.data !== undefined && code.startsWith(shown.code)) text.firstChild.appendData(code.slice(shown.code.length));
      else text.replaceChildren(code);
    }
    if (atEnd && code.length > shown.code.length) box.scrollTop = box.scrollHeight;
    shown = { code, language };
  };
  write(block);
  if (block.language && !languages) load().then(() => paint(text, shown.code, shown.language), () => {}); // without colours, then
  const head = el("figcaption", {}, name, copyButton(() => shown.code));
  return { node: el("figure", { class: "code", dir: "ltr" }, head, box), write };
}

/** Fill a node with coloured code. Returns false where the language is not known. */
function paint(node, code, language) {
  const name = language.toLowerCase();
  const grammar = languages?.of(ALIASES[name] ?? name);
  if (typeof grammar !== "object" || code.length > MAX_COLOURED) return false;
  node.replaceChildren(...languages.tokenize(code, grammar).map(coloured));
  return true;
}

function coloured(token) {
  if (typeof token === "string") return token;
  return el("span", { class: `code-${token.type}` }, [token.content].flat().map(coloured));
}

// Formulas in Markdown: \( \), \[ \], $$ $$ and $ $, as MathML.

import { el, whenStill } from "./dom.js";

const CLOSING = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
const PROSE = /(^| )[a-z]{2,}( |$)/i; // between two prices
let render = null; // once it is loaded
let loading = null;

const marked = (text, at, marks) => marks.find((mark) => text.startsWith(mark, at));

/** A plugin of markdown-it: tokens of type "formula", with {display} in their meta. */
export function formulas(md) {
  md.inline.ruler.before("escape", "formula", inline);
  md.block.ruler.before("fence", "formula", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

function inline(state, silent) {
  const { src, pos } = state;
  const mark = marked(src, pos, Object.keys(CLOSING));
  const end = mark ? closing(state, mark) : -1;
  if (end < 0) return false;
  const content = src.slice(pos + mark.length, end);
  if (!/[\p{L}\p{N}]/u.test(content) || (mark === "$" && PROSE.test(content) && !content.includes("\\"))) return false;
  if (!silent) push(state, content, mark === "$$" || mark === "\\[");
  state.pos = end + mark.length;
  return true;
}

/** Where a formula ends that begins here; -1 if it does not. */
function closing(state, mark) {
  const unclosed = (state.unclosed ??= new Set()); // so that no text takes quadratic time
  const { src } = state;
  const start = state.pos + mark.length;
  if (unclosed.has(mark) || (mark === "$" && /\s|\$|^$/.test(src[start] ?? ""))) return -1;
  const end = src.indexOf(CLOSING[mark], start);
  if (end < 0) unclosed.add(mark);
  // As in Pandoc, so that prices are no formulas.
  if (mark === "$" && (/[\s\\]/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? ""))) return -1;
  return end;
}

function block(state, start, end, silent) {
  const line = (i) => state.src.slice(state.bMarks[i] + state.tShift[i], state.eMarks[i]).trimEnd();
  const mark = marked(line(start), 0, ["\\[", "$$"]);
  if (!mark || state.sCount[start] - state.blkIndent >= 4) return false;
  for (let i = start; i < end && line(i); i++) {
    const at = line(i).indexOf(CLOSING[mark], i === start ? 2 : 0);
    if (at < 0) continue;
    if (at + 2 < line(i).length) return false; // text follows: it is a paragraph
    if (silent) return true;
    const token = push(state, state.getLines(start, i + 1, state.blkIndent, false).trim().slice(2, -2), true);
    [state.line, token.map, token.block] = [i + 1, [start, i + 1], true];
    return true;
  }
  return false;
}

function push(state, content, display) {
  const token = state.push("formula", "math", 0);
  [token.content, token.meta] = [content.trim(), { display }];
  return token;
}

/** The node of a formula; what cannot be read stays as it is written. */
export function formula({ content, meta: { display } }) {
  const source = display ? `\\[${content}\\]` : `\\(${content}\\)`;
  const node = el(display ? "div" : "span", { class: "formula", dir: "ltr", ...(display ? { tabindex: "0", role: "region", "aria-label": "Formula" } : {}) }, source);
  const show = () => {
    try {
      render(content, node, { displayMode: display, throwOnError: true });
    } catch {
      node.replaceChildren(source);
    }
  };
  if (render) show();
  else loadMath().then(() => whenStill(node, show), () => {});
  return node;
}

export function loadMath() {
  loading ??= import("./vendor/math.js").then((library) => (render = library.render));
  return loading;
}

// Markdown as DOM nodes, while it is being written.
//
// markdown-it reads it. What it finds becomes elements and text nodes here and nothing else: HTML is shown as it is
// written. Pictures are links, since a picture that is loaded tells somebody that it is seen.

import { el } from "./dom.js";
import { listing } from "./listing.js";
import { formula, formulas } from "./math.js";
import { MarkdownIt, footnote } from "./vendor/markdown.js";

const md = new MarkdownIt({ linkify: true, breaks: true, maxNesting: 40 }).use(footnote).use(formulas).use(lineBreaks).use(tasks);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

/** <br>, the one element that models write for want of another way, as in the cells of a table. */
function lineBreaks(md) {
  md.inline.ruler.push("br", (state, silent) => {
    const found = /^<br ?\/?>/i.exec(state.src.slice(state.pos, state.pos + 6));
    if (!found) return false;
    if (!silent) state.push("hardbreak", "br", 0);
    state.pos += found[0].length;
    return true;
  });
}

/** Items that begin with [ ] or [x]. */
function tasks(md) {
  md.core.ruler.push("tasks", ({ tokens }) => {
    tokens.forEach(({ type, content, children }, i) => {
      if (type !== "inline" || tokens[i - 2]?.type !== "list_item_open" || !/^\[[ xX]\] /.test(content)) return;
      tokens[i - 2].meta = { done: content[1] !== " " };
      children[0].content = children[0].content.slice(4);
    });
  });
}

/**
 * Shows a text that grows. What is complete is left alone; the last block is made again, and the one before it too
 * while the last line is not known whole: it may still belong to that one. A text with references or footnotes is made
 * again as a whole, since a later line may change any earlier one.
 */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.text = "";
    this.linked = false; // whether it has references or footnotes
    this.begin();
  }

  begin() {
    this.done = 0; // where the first block begins that may change
    this.open = []; // such blocks
  }

  show(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    let found = parse(text.slice(this.done));
    if (this.done && found.linked) {
      this.root.replaceChildren();
      this.begin();
      found = parse(text);
    }
    this.linked ||= found.linked;
    this.replace(found.blocks);
    const last = text.slice(this.done).split("\n").length - 1;
    const from = Math.max(0, found.blocks.findLastIndex(({ line }) => line < last));
    if (from === 0 || this.linked) return;
    this.open = this.open.slice(from);
    this.done = offset(text, this.done, found.blocks[from].line);
  }

  /** Show blocks in the place of those that were open; a listing that grows keeps its place on the screen. */
  replace(blocks) {
    const [old, ...others] = this.open;
    for (const { node } of others) node.remove();
    const kept = old?.write && isCode(blocks[0]?.tokens[0]);
    if (kept) old.write(code(blocks[0].tokens[0]));
    else old?.node.remove();
    const made = blocks.slice(kept ? 1 : 0).map(({ tokens }) => render(tokens));
    this.root.append(...made.map(({ node }) => node));
    this.open = kept ? [old, ...made] : made;
  }
}

/** The nodes of a whole text. */
export function markdown(text) {
  return parse(text).blocks.map(({ tokens }) => render(tokens).node);
}

/** The blocks of a text, {tokens, line}, and whether something in it refers to another place. */
function parse(text) {
  const env = {};
  const blocks = [];
  let depth = 0;
  for (const token of md.parse(text, env)) {
    if (!depth) blocks.push({ tokens: [], line: token.map?.[0] ?? Infinity });
    blocks.at(-1).tokens.push(token);
    depth += token.nesting;
  }
  return { blocks, linked: Boolean(env.references || env.footnotes) };
}

/** Where the line begins that is `lines` lines after the place `from`. */
function offset(text, from, lines) {
  for (let i = 0; i < lines; i++) from = text.indexOf("\n", from) + 1;
  return from;
}

const isCode = (token) => ["fence", "code_block"].includes(token?.type);
const code = ({ content, info }) => ({ code: content.replace(/\n$/, ""), language: info.trim().split(/\s/)[0] });

/** {node}, and for a listing also {write}. Its direction is that of its first letter. */
function render(tokens) {
  if (isCode(tokens[0])) return listing(code(tokens[0]));
  const root = document.createDocumentFragment();
  build(tokens, root);
  const node = root.firstChild;
  if (!node.dir && node.tagName !== "HR") node.dir = "auto";
  return { node };
}

function build(tokens, root) {
  const open = [root]; // in which what comes is appended
  const endings = [];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.type === "inline") build(token.children, parent);
    else if (token.nesting < 0) open.pop().append(endings.pop());
    else if (token.nesting > 0) {
      const { node, inner = node, ending = "" } = token.hidden ? { node: null, inner: parent } : element(token);
      if (node) parent.append(node);
      open.push(inner);
      endings.push(ending);
    } else parent.append(leaf(token));
  }
}

/** What a token opens: {node}, {inner} in which its content goes, and {ending}, a text after that. */
function element(token) {
  const { type, tag } = token;
  const align = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1] ?? "left";
  if (type === "heading_open") return { node: el(`h${Math.min(6, Number(tag[1]) + 2)}`) };
  if (type === "link_open") return link(token.attrGet("href"));
  if (type === "ordered_list_open") return { node: el("ol", { start: token.attrGet("start") ?? 1 }) };
  if (type === "list_item_open" && token.meta) {
    const { done } = token.meta;
    return { node: el("li", { class: "task" }, el("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" }), " ") };
  }
  if (type === "table_open") {
    const inner = el("table");
    return { inner, node: el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, inner) };
  }
  if (type === "footnote_block_open") {
    const inner = el("ol");
    return { inner, node: el("section", { class: "footnotes", "aria-label": "Footnotes" }, inner) };
  }
  if (type === "footnote_open") return { node: el("li") };
  return { node: el(tag === "s" ? "del" : tag, ["th", "td"].includes(tag) ? { class: align } : {}) };
}

function leaf(token) {
  const { type, content } = token;
  if (isCode(token)) return listing(code(token)).node;
  if (type === "formula") return formula(token);
  if (type === "code_inline") return el("code", { dir: "ltr" }, content);
  if (type === "hr") return el("hr");
  if (type === "softbreak" || type === "hardbreak") return el("br");
  if (type === "footnote_ref") return el("sup", {}, `[${token.meta.id + 1}]`);
  if (type === "image") {
    const { node, inner = node, ending = "" } = link(token.attrGet("src"));
    inner.append(`image: ${md.renderer.renderInlineAsText(token.children, md.options, {})}`, ending);
    return node;
  }
  return content; // text, and what has no form of its own
}

/** A link that leaves nothing of this page behind; a target of any other kind than the web's and mail's stays text. */
function link(target) {
  const url = URL.canParse(target) ? new URL(target) : null;
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return { node: el("span"), ending: ` (${target})` };
  return { node: el("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }) };
}

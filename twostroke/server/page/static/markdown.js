// Markdown as DOM nodes, while it is being written.
//
// Text becomes text nodes and nothing else: HTML in it is shown as it is written. Pictures are links, since a picture
// that is loaded tells somebody that it is seen. The time is linear in the length of the text, whatever the text is.

import { copyButton, el } from "./dom.js";

const DEPTH = 8; // of lists and quotes in one another
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const blank = (line) => line.trim() === "";
const isRule = (line) => line.length < 200 && RULE.test(line);

/**
 * Shows a text that grows. What is complete is left alone; the last block is made again, and the one before it too
 * while the last line is not known whole: it may still belong to that one.
 */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.root.dir = "auto";
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.text = "";
    this.done = 0; // where the first block begins that may change
    this.open = []; // such blocks
  }

  show(text) {
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const lines = text.slice(this.done).split("\n");
    const blocks = parse(lines, 0);
    const [old, ...others] = this.open;
    for (const other of others) other.node.remove();
    let made = [];
    if (old?.code && blocks[0]?.code !== undefined) {
      old.write(blocks[0]); // a listing that grows keeps its place on the screen
      made = [old];
    } else old?.node.remove();
    made.push(...blocks.slice(made.length).map(render));
    this.root.append(...made.slice(old === made[0] ? 1 : 0).map(({ node }) => node));
    const whole = blocks.findLastIndex(({ line }) => line < lines.length - 1);
    const from = Math.max(0, whole);
    this.open = made.slice(from);
    if (from > 0) this.done = offset(text, this.done, blocks[from].line);
  }
}

/** Where the line begins that is `lines` lines after the place `from`. */
function offset(text, from, lines) {
  for (let i = 0; i < lines; i++) from = text.indexOf("\n", from) + 1;
  return from;
}

/** A whole text. */
export function markdown(text, depth = 0) {
  return parse(text.split("\n"), depth).map((block) => render(block).node);
}

// Blocks ---------------------------------------------------------------------------------------------------------

/** The blocks of some lines: what each is, and the line at which it begins. */
function parse(lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (blank(lines[i])) {
      i++;
      continue;
    }
    const [block, next] = nextBlock(lines, i, depth);
    blocks.push({ ...block, line: i, depth });
    i = next;
  }
  return blocks;
}

function nextBlock(lines, i, depth) {
  const line = lines[i];
  let found;
  if ((found = FENCE.exec(line))) return fenced(lines, i, found);
  if ((found = HEADING.exec(line))) {
    return [{ heading: found[1].length, text: (found[2] ?? "").trim().replace(/[ \t]#{1,20}$/, "") }, i + 1];
  }
  if (isRule(line)) return [{ rule: true }, i + 1];
  if (depth < DEPTH && QUOTE.test(line)) {
    let stop = i;
    while (stop < lines.length && QUOTE.test(lines[stop])) stop++;
    return [{ quote: lines.slice(i, stop).map((one) => one.replace(QUOTE, "")) }, stop];
  }
  if (depth < DEPTH && ITEM.test(line)) return list(lines, i);
  if (line.includes("|") && columns(lines[i + 1])) return table(lines, i);
  let stop = i + 1;
  while (stop < lines.length && !blank(lines[stop]) && !interrupts(lines, stop, depth)) stop++;
  return [{ text: lines.slice(i, stop).join("\n") }, stop];
}

/** Whether a line in the middle of a paragraph begins something else. */
function interrupts(lines, i, depth) {
  const line = lines[i];
  const item = depth < DEPTH && ITEM.exec(line);
  return (
    FENCE.test(line) || HEADING.test(line) || isRule(line) ||
    (depth < DEPTH && QUOTE.test(line)) || (item && item[0].length < line.length) ||
    (line.includes("|") && columns(lines[i + 1]) !== null)
  );
}

function fenced(lines, i, [, mark, info]) {
  const isEnd = (line) => line.trim().startsWith(mark) && line.trim() === mark[0].repeat(line.trim().length);
  let stop = i + 1;
  while (stop < lines.length && !isEnd(lines[stop])) stop++;
  return [{ code: lines.slice(i + 1, stop).join("\n"), language: info.trim().split(/\s/)[0] }, stop + 1];
}

function list(lines, i) {
  const [, before, mark] = ITEM.exec(lines[i]);
  const ordered = mark.length > 1;
  const items = [];
  let width = 0;
  let gap = false; // whether the line before is blank
  for (; i < lines.length; i++) {
    const line = lines[i];
    const indent = line.length - line.trimStart().length;
    const found = indent < before.length + 2 ? ITEM.exec(line) : null;
    if (blank(line)) items.at(-1)?.push("");
    else if (found && found[2].length > 1 === ordered && !isRule(line)) {
      width = found[0].length;
      items.push([line.slice(width)]);
    } else if (items.length && indent >= before.length + 2) items.at(-1).push(line.slice(Math.min(indent, width)));
    else if (items.length && !gap && !interrupts(lines, i, 0)) items.at(-1).push(line);
    else break;
    gap = blank(line);
  }
  return [{ ordered, items, start: ordered ? parseInt(mark, 10) : 1 }, i];
}

/** The alignment of each column if a line is the second of a table, else null. */
function columns(line) {
  if (line === undefined || line.length > 2000 || !line.includes("-")) return null;
  const found = cells(line);
  if (!found.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return found.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
}

function cells(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  return text.replaceAll("\\|", "\u0000").split("|").map((cell) => cell.replaceAll("\u0000", "|").trim());
}

function table(lines, i) {
  const aligned = columns(lines[i + 1]);
  let stop = i + 2;
  while (stop < lines.length && lines[stop].includes("|")) stop++;
  return [{ head: cells(lines[i]), rows: lines.slice(i + 2, stop).map(cells), aligned }, stop];
}

/** {node}, and for a listing also {code, write}. */
function render(block) {
  if (block.code !== undefined) return listing(block);
  if (block.heading) return { node: el(`h${Math.min(6, block.heading + 2)}`, { dir: "auto" }, inline(block.text)) };
  if (block.rule) return { node: el("hr") };
  if (block.quote) return { node: el("blockquote", { dir: "auto" }, markdown(block.quote.join("\n"), block.depth + 1)) };
  if (block.items) {
    const items = block.items.map((lines) => el("li", { dir: "auto" }, item(lines.join("\n"), block.depth + 1)));
    return { node: el(block.ordered ? "ol" : "ul", block.ordered ? { start: block.start } : {}, items) };
  }
  if (block.rows) return { node: tabular(block) };
  return { node: el("p", { dir: "auto" }, inline(block.text)) };
}

/** An item's blocks; text alone is no paragraph of its own. */
function item(text, depth) {
  const nodes = markdown(text, depth);
  return nodes.flatMap((node) => (node.tagName === "P" && !text.includes("\n\n") ? [...node.childNodes] : [node]));
}

function tabular({ head, rows, aligned }) {
  const row = (kind, texts) =>
    el("tr", {}, head.map((_, i) => el(kind, { class: aligned[i] ?? "left", dir: "auto" }, inline(texts[i] ?? ""))));
  const whole = el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((one) => row("td", one))));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, whole);
}

/** A listing with its language and a button to copy it. */
export function listing(block) {
  const text = document.createTextNode("");
  const name = el("span");
  const box = el("pre", { tabindex: "0", role: "region" }, el("code", {}, text));
  const write = ({ code, language }) => {
    name.textContent = language || "text";
    box.setAttribute("aria-label", `Code, ${name.textContent}`);
    if (code.startsWith(text.data)) text.appendData(code.slice(text.data.length));
    else text.data = code;
  };
  write(block);
  const head = el("figcaption", {}, name, copyButton(() => text.data));
  return { node: el("figure", { class: "code", dir: "ltr" }, head, box), code: true, write };
}

// Within a line --------------------------------------------------------------------------------------------------

const PLAIN = /[^\\`*_~[\]!<h\n]+/y;
const URL_START = /https?:\/\/[^\s<>"`]{1,2000}/y;
const TARGET = /\(([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)(?:\s{1,3}"[^"\n]{0,500}")?\)/y;
const BREAK = /<br ?\/?>/y;
const TAGS = { "*": "em", "**": "strong", _: "em", __: "strong", "~~": "del" };
const space = (char) => char === undefined || /\s/.test(char);
const word = (char) => char !== undefined && /[\p{L}\p{N}_]/u.test(char);

/** The nodes of a text without blocks. */
export function inline(text) {
  return new Inline(text).nodes();
}

/** Nodes and open marks in one list: a mark that is closed wraps what came since, one that never is stays text. */
class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.out = [];
    this.open = []; // indices in `out` of open marks
    this.waiting = {}; // of each mark, indices in `open`
    this.unclosed = new Set(); // lengths of backtick runs that no later run closes
  }

  nodes() {
    while (this.at < this.text.length) this.step();
    return this.out.map((one) => one.mark ?? one);
  }

  step() {
    const char = this.text[this.at];
    if (this.match(PLAIN)) this.add(this.found[0]);
    else if (char === "\n") this.take(1, el("br"));
    else if (char === "\\") this.escape();
    else if (char === "`") this.code();
    else if (char === "h") this.link();
    else if (char === "<") this.match(BREAK) ? this.out.push(el("br")) : this.take(1, char);
    else if (char === "[") this.begin("[", 1);
    else if (char === "!") this.text[this.at + 1] === "[" ? this.begin("![", 2) : this.take(1, char);
    else if (char === "]") this.endLink();
    else this.marks(char);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    this.found = pattern.exec(this.text);
    if (this.found) this.at = pattern.lastIndex;
    return this.found !== null;
  }

  take(count, node) {
    this.at += count;
    this.add(node);
  }

  add(node) {
    if (typeof node === "string" && typeof this.out.at(-1) === "string") this.out[this.out.length - 1] += node;
    else this.out.push(node);
  }

  begin(mark, count) {
    (this.waiting[mark] ??= []).push(this.open.length);
    this.open.push(this.out.length);
    this.take(count, { mark });
  }

  /** Close the last open mark of a kind; returns what came since. */
  end(mark) {
    const at = this.waiting[mark].at(-1);
    const since = this.out.splice(this.open[at]).slice(1).map((one) => one.mark ?? one);
    for (const indices of Object.values(this.waiting)) while (indices.length && indices.at(-1) >= at) indices.pop();
    this.open.length = at;
    return since;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") this.take(2, el("br"));
    else if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) this.take(2, next);
    else this.take(1, "\\");
  }

  code() {
    const length = this.run("`");
    const mark = "`".repeat(length);
    const end = this.unclosed.has(length) ? -1 : this.closing(mark);
    if (end < 0) {
      this.unclosed.add(length);
      this.take(length, mark);
    } else {
      const code = this.text.slice(this.at + length, end).replaceAll("\n", " ");
      this.out.push(el("code", { dir: "ltr" }, code.length > 2 && /^ .* $/s.test(code) ? code.slice(1, -1) : code));
      this.at = end + length;
    }
  }

  /** Where a run of exactly these backticks is, after this one. */
  closing(mark) {
    let at = this.at + mark.length;
    while ((at = this.text.indexOf(mark, at)) >= 0) {
      let stop = at + mark.length;
      while (this.text[stop] === "`") stop++;
      if (stop === at + mark.length) return at;
      at = stop;
    }
    return -1;
  }

  run(char) {
    let stop = this.at;
    while (this.text[stop] === char) stop++;
    return stop - this.at;
  }

  link() {
    if (word(this.text[this.at - 1]) || !this.match(URL_START)) {
      this.take(1, "h");
      return;
    }
    let url = this.found[0].replace(/[.,;:!?*_~'\]]{1,20}$/, "");
    if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
    this.at += url.length - this.found[0].length;
    this.out.push(anchor(url, [url]));
  }

  endLink() {
    const mark = ["![", "["]
      .filter((one) => this.waiting[one]?.length)
      .sort((a, b) => this.waiting[b].at(-1) - this.waiting[a].at(-1))[0];
    if (!mark) return this.take(1, "]");
    this.at += 1;
    if (this.match(TARGET)) {
      const url = this.found[1];
      const label = this.end(mark);
      this.out.push(anchor(url, mark === "![" ? ["image: ", ...label] : label));
    } else {
      this.waiting[mark].pop(); // it stays text, and marks within it stay open
      this.add("]");
    }
    return undefined;
  }

  marks(char) {
    const length = this.run(char);
    const [before, after] = [this.text[this.at - 1], this.text[this.at + length]];
    const inWord = char === "_";
    const opens = !space(after) && !(inWord && word(before));
    const closes = !space(before) && !(inWord && word(after));
    if (char === "~" && length !== 2) return this.take(length, char.repeat(length));
    let left = length;
    while (left > 0 && closes) {
      const kinds = (left > 1 ? [char + char, char] : [char]).filter((kind) => this.waiting[kind]?.length);
      if (!kinds.length) break;
      const mark = kinds.sort((a, b) => this.waiting[b].at(-1) - this.waiting[a].at(-1))[0];
      const nodes = this.end(mark);
      this.take(mark.length, el(TAGS[mark], {}, nodes));
      left -= mark.length;
    }
    while (left > 0) {
      const mark = left > 1 ? char + char : char;
      if (opens && TAGS[mark]) this.begin(mark, mark.length);
      else this.take(mark.length, mark);
      left -= mark.length;
    }
    return undefined;
  }
}

/** A link that leaves nothing of this page behind; a target of any other kind than the web's and mail's stays text. */
function anchor(url, label) {
  let known = null;
  try {
    known = new URL(url);
  } catch {
    return el("span", {}, label, ` (${url})`);
  }
  if (!["http:", "https:", "mailto:"].includes(known.protocol)) return el("span", {}, label, ` (${url})`);
  return el("a", { href: known.href, title: known.href, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

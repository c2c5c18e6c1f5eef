// An answer on the screen: Markdown, JSON, calls of tools, its tokens, and what it took.

import { announce, button, copyButton, el, oncePerFrame } from "./dom.js";
import { listing, MarkdownView } from "./markdown.js";
import { drawCaches } from "./pages.js";
import { TokensView } from "./tokens.js";

const SPOKEN = 3000; // characters of an answer that screen readers are told without being asked

export class AnswerView {
  /** `actions`: attend(index, chosen), result(call, text), take(answer); null where there is none. */
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.thought = el("pre", { dir: "auto" });
    this.thinking = el("details", { class: "thought", hidden: true }, el("summary", {}, "Thoughts"), this.thought);
    this.body = el("div", { class: "markdown" });
    this.text = new MarkdownView(this.body);
    this.calls = el("div", { class: "calls" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.canvas = el("canvas", { role: "img", "aria-label": "Pages of its KV cache" });
    this.caption = el("figcaption", { class: "hint" });
    this.cache = el("figure", { class: "cache", hidden: true }, this.canvas, this.caption);
    this.about = el("p", { class: "hint", hidden: true });
    this.facts = el("span", { class: "facts" });
    this.tokens = null;
    this.toggle = button("Tokens", () => this.showTokens(), { "aria-expanded": "false" });
    this.node = el(
      "div",
      { class: "answer" },
      el("p", { class: "method" }, answer.method),
      this.thinking, this.body, this.calls, this.error, this.about, this.cache,
      el("div", { class: "actions" }, copyButton(() => answer.content), this.toggle, ...this.more(), this.facts),
    );
    this.update = oncePerFrame(() => this.show());
    this.show();
  }

  more() {
    const { take } = this.actions;
    return take ? [button("Go on with this one", () => take(this.answer))] : [];
  }

  show() {
    const { answer } = this;
    const going = ["waiting", "answering"].includes(answer.state);
    this.node.setAttribute("aria-busy", String(going));
    this.node.classList.toggle("going", going);
    const { thought, text } = parts(answer.content);
    this.thinking.hidden = !thought;
    if (thought && this.thought.textContent !== thought) this.thought.textContent = thought;
    const value = going ? undefined : json(text);
    if (value === undefined) this.text.show(text);
    else this.body.replaceChildren(listing({ code: JSON.stringify(value, null, 2), language: "json" }).node);
    this.showCalls(going);
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ? `No answer: ${answer.error}.` : "";
    this.about.hidden = !answer.warnings;
    this.about.textContent = (answer.warnings ?? []).join("; ");
    this.facts.textContent = facts(answer);
    this.toggle.hidden = !answer.tokens?.length;
    this.tokens?.show();
    this.drawCache();
  }

  showCalls(going) {
    const { calls } = this.answer;
    if (going || this.shownCalls !== calls.length) {
      this.calls.replaceChildren(...calls.map((call) => callCard(call, going, this.actions.result)));
      this.shownCalls = going ? -1 : calls.length;
    }
  }

  showTokens() {
    const open = this.tokens === null;
    this.toggle.setAttribute("aria-expanded", String(open));
    if (open) {
      this.tokens = new TokensView(this.answer, this.actions.attend);
      this.body.after(this.tokens.node);
    } else {
      this.tokens.node.remove();
      this.tokens = null;
    }
    this.body.hidden = open;
  }

  drawCache() {
    const { cache } = this.answer;
    this.cache.hidden = !cache?.length;
    if (cache?.length && this.node.isConnected) this.caption.textContent = drawCaches(this.canvas, cache);
  }

  finished() {
    const { state, count } = this.answer;
    if (state === "failed") return; // its error is an alert
    const ended = `The answer is ${state === "done" ? "complete" : "stopped"}: ${count} tokens.`;
    announce(`${ended} ${this.body.textContent.slice(0, SPOKEN)}`);
  }
}

/** What a model thought aloud before its answer, and the answer. */
function parts(content) {
  if (!content.startsWith("<think>")) return { thought: "", text: content };
  const end = content.indexOf("</think>");
  const text = end < 0 ? "" : content.slice(end + 8).trimStart();
  return { thought: content.slice(7, end < 0 ? undefined : end).trim(), text };
}

/** The value of a text that is a JSON object or list, else undefined. */
function json(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function callCard(call, going, result) {
  const value = json(call.arguments);
  const shown = value === undefined ? call.arguments : JSON.stringify(value, null, 2);
  const parts = [el("p", {}, "Calls ", el("code", {}, call.name)), listing({ code: shown, language: "json" }).node];
  if (!going && result) {
    const input = el("textarea", { rows: "2", "aria-label": `What ${call.name} gave` });
    parts.push(el("label", {}, "Its result", input), button("Send the result", () => result(call, input.value)));
  }
  return el("section", { class: "call", "aria-label": `Call of ${call.name}` }, parts);
}

function facts(answer) {
  const { timings, usage, count } = answer;
  if (answer.state === "waiting") return "waiting";
  const made = [`${usage?.completion_tokens ?? count} tokens`];
  const ttft = timings?.ttft_ms ?? answer.first;
  if (ttft) made.push(`first after ${ttft < 10 ? ttft.toFixed(1) : Math.round(ttft)} ms`);
  if (timings?.itl_mean_ms) made.push(`${(1e3 / timings.itl_mean_ms).toFixed(1)} tokens/s`);
  if (usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: details } = usage;
    made.push(`${details.cached_tokens} of ${prompt} prompt tokens from the cache`);
  }
  for (const [name, value] of Object.entries(answer.counted ?? {})) made.push(`${name} ${value}`);
  if (answer.state === "stopped") made.push("stopped");
  if (answer.finish === "length") made.push("cut at its limit of tokens");
  return made.join(" · ");
}

// An answer on the screen: Markdown, JSON, calls of tools, its tokens, and what it took.

import { going } from "./ask.js";
import { announce, button, copyButton, download, el, oncePerFrame, whenStill } from "./dom.js";
import { listing } from "./listing.js";
import { MarkdownView } from "./markdown.js";
import { drawCaches } from "./pages.js";
import { TokensView } from "./tokens.js";

const SPOKEN = 3000; // characters of an answer that screen readers are told without being asked

export class AnswerView {
  /**
   * `actions`: running(), attend(index, chosen), explain(), branch(index, alternative), goOn(), and null where there is none:
   * take(), result(call, text).
   */
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.thought = el("pre", { dir: "auto" });
    this.thoughts = el("summary");
    this.thinking = el("details", { class: "thought", hidden: true }, this.thoughts, this.thought);
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
    this.explain = button("Explain", () => this.explained(), { title: "Save a page that walks through how this answer was made" });
    this.goOn = button("Continue", actions.goOn, { hidden: true });
    const take = actions.take ? button("Go on with this one", actions.take) : null;
    this.node = el(
      "div",
      { class: "answer" },
      el("p", { class: "method" }, answer.method),
      this.thinking, this.body, this.calls, this.error, this.about, this.cache,
      el("div", { class: "actions" }, copyButton(() => answer.content), this.toggle, this.explain, this.goOn, take, this.facts),
    );
    this.update = oncePerFrame(() => whenStill(this, () => this.show()));
    this.show();
  }

  show() {
    const { answer } = this;
    const running = this.actions.running();
    this.node.setAttribute("aria-busy", String(running));
    this.node.classList.toggle("going", running);
    const { thought, content: text } = answer;
    this.thinking.hidden = !thought;
    this.thoughts.textContent = running && !text ? "Thinking" : "Thoughts";
    if (thought && this.thought.textContent !== thought) this.thought.textContent = thought;
    const value = running ? undefined : json(text);
    if (value === undefined) this.text.show(text);
    else this.text.show(`\`\`\`json\n${JSON.stringify(value, null, 2)}\n\`\`\``);
    this.showCalls(running);
    this.error.hidden = !answer.error;
    this.error.textContent = answer.error ? `No answer: ${answer.error}.` : "";
    this.about.hidden = !answer.warnings;
    this.about.textContent = (answer.warnings ?? []).join("; ");
    this.facts.textContent = facts(answer, running);
    this.goOn.hidden = running || !answer.content || answer.calls.length > 0 || !(answer.finish === "length" || answer.state !== "done");
    this.toggle.hidden = !answer.tokens?.length;
    const made = answer.tokens?.slice(answer.forked ?? 0) ?? [];
    this.explain.hidden = running || !answer.tokens?.length || made.some(({ id }) => id === undefined);
    this.tokens?.show();
    this.drawCache();
  }

  showCalls(running) {
    const { calls, state } = this.answer;
    if (running || this.shownCalls !== calls.length) {
      this.calls.replaceChildren(...calls.map((call) => callCard(call, state === "done" && this.actions.result)));
      this.shownCalls = running ? -1 : calls.length;
    }
  }

  showTokens() {
    const open = this.tokens === null;
    this.toggle.setAttribute("aria-expanded", String(open));
    if (open) {
      this.tokens = new TokensView(this.answer, this.actions);
      this.body.after(this.tokens.node);
    } else {
      this.tokens.node.remove();
      this.tokens = null;
    }
    this.body.hidden = open;
  }

  /** Save the walk through this answer as a file. */
  async explained() {
    this.explain.disabled = true;
    this.explain.textContent = "Explaining";
    try {
      download("explanation.html", await this.actions.explain());
    } catch (error) {
      this.error.hidden = false;
      this.error.textContent = `No explanation: ${error.message}.`;
    }
    this.explain.disabled = false;
    this.explain.textContent = "Explain";
  }

  drawCache() {
    const { cache, usage, method } = this.answer;
    this.cache.hidden = !cache?.length;
    if (!cache?.length || !this.node.isConnected) return;
    const found = method === "plain" ? Math.floor((usage?.prompt_tokens_details.cached_tokens ?? 0) / cache[0].page_size) : 0;
    this.caption.textContent = drawCaches(this.canvas, cache, found);
  }

  finished() {
    const { state, count } = this.answer;
    if (state === "failed") return; // its error is an alert
    const ended = `The answer is ${state === "done" ? "complete" : "stopped"}: ${count} tokens.`;
    announce(`${ended} ${this.body.textContent.slice(0, SPOKEN)}`);
  }
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

function callCard(call, result) {
  const value = json(call.arguments);
  const shown = value === undefined ? call.arguments : JSON.stringify(value, null, 2);
  const parts = [el("p", {}, "Calls ", el("code", {}, call.name)), listing({ code: shown, language: "json" }).node];
  if (result) {
    const input = el("textarea", { rows: "2", "aria-label": `What ${call.name} gave` });
    parts.push(el("label", {}, "Its result", input), button("Send the result", () => result(call, input.value)));
  }
  return el("section", { class: "call", "aria-label": `Call of ${call.name}` }, parts);
}

function facts(answer, running) {
  const { timings, usage, count } = answer;
  if (running && answer.state === "waiting") return answer.progress || "waiting";
  const made = [`${(usage && answer.made) || count} tokens`];
  const ttft = timings?.ttft_ms ?? answer.first;
  if (ttft) made.push(`first after ${ttft < 10 ? ttft.toFixed(1) : Math.round(ttft)} ms`);
  if (timings?.itl_mean_ms) made.push(`${(1e3 / timings.itl_mean_ms).toFixed(1)} tokens/s`);
  if (usage) {
    const { prompt_tokens: prompt, prompt_tokens_details: details } = usage;
    made.push(`${details.cached_tokens} of ${prompt} prompt tokens from the cache`);
  }
  for (const [name, value] of Object.entries(answer.counted ?? {})) made.push(`${name} ${value}`);
  if (answer.state === "stopped" || (going(answer) && !running)) made.push("stopped");
  if (running && answer.progress) made.push(answer.progress);
  if (answer.finish === "length") made.push("cut at its limit of tokens");
  return made.join(" · ");
}

// A conversation on the screen: asking, stopping, asking again, changing a question.

import { ask, attention, emptyAnswer, messages } from "./ask.js";
import { AnswerView } from "./answer.js";
import { save } from "./conversations.js";
import { announce, button, byId, copyButton, el } from "./dom.js";
import { fields, promptFields } from "./settings.js";

export class Chat {
  /** `changed` is called when the conversation's place in the list may be another. */
  constructor(conversation, changed) {
    this.conversation = conversation;
    this.changed = changed;
    this.views = new Map(); // of answers
    this.abort = null;
    this.closed = false;
    for (const answer of conversation.turns.flatMap(({ answers }) => answers ?? [])) {
      if (["waiting", "answering"].includes(answer.state)) answer.state = "stopped"; // with a page that is gone
    }
    this.show(true);
  }

  get going() {
    return this.abort !== null;
  }

  /** Another conversation takes its place. */
  close() {
    this.closed = true;
    this.stop();
  }

  stop() {
    this.abort?.abort();
  }

  /** Ask a new question. */
  async say(text) {
    if (this.going || !text.trim()) return;
    this.conversation.title ||= text.trim().slice(0, 80);
    this.conversation.turns.push({ role: "user", content: text });
    await this.answer();
  }

  /** Answer the turns that there are. */
  async answer() {
    const { conversation } = this;
    const { settings } = conversation;
    const ways = settings.compare ? ["method", "other"] : ["method"];
    let bodies;
    try {
      const asked = messages(conversation);
      bodies = ways.map((way) => ({ messages: asked, ...fields(settings, way) }));
    } catch (error) {
      this.refuse(error.message);
      return;
    }
    const answers = ways.map((way) => emptyAnswer(settings[way]));
    conversation.turns.push({ role: "assistant", answers, chosen: 0 });
    this.abort = new AbortController();
    this.show(true);
    this.keep();
    announce("Answering");
    const { signal } = this.abort;
    const asking = answers.map((answer, i) => ask(bodies[i], answer, () => this.shown(answer), signal));
    await Promise.all(asking);
    this.abort = null;
    if (this.closed) {
      save(conversation);
      return;
    }
    for (const answer of answers) this.views.get(answer)?.finished();
    this.keep();
    this.show();
  }

  /** Drop the answer, and all after it, and answer again. */
  async again(turn) {
    if (this.going) return;
    this.conversation.turns.splice(this.conversation.turns.indexOf(turn));
    await this.answer();
  }

  /** Change a question: what came after it goes. */
  edit(turn, node) {
    if (this.going) return;
    const input = el("textarea", { "aria-label": "The question", rows: String(Math.min(12, turn.content.split("\n").length + 1)) });
    input.value = turn.content;
    const send = async () => {
      if (!input.value.trim()) return;
      const { turns } = this.conversation;
      turn.content = input.value;
      turns.splice(turns.indexOf(turn) + 1);
      await this.answer();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.show();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    node.replaceChildren(input, el("div", { class: "actions" }, button("Ask this", send), button("Cancel", () => this.show())));
    input.focus();
  }

  /** What a tool gave, written by the user; the model goes on when every call has its result. */
  async result(turn, call, text) {
    const { turns } = this.conversation;
    turns.push({ role: "tool", id: call.id, name: call.name, content: text });
    const given = new Set(turns.slice(turns.indexOf(turn)).map(({ id }) => id));
    if (turn.answers[turn.chosen].calls.every(({ id }) => given.has(id))) await this.answer();
    else {
      this.keep();
      this.show();
    }
  }

  keep() {
    byId("not-kept").hidden = save(this.conversation);
    this.changed();
  }

  refuse(message) {
    byId("refused").textContent = message;
    byId("refused").hidden = false;
  }

  shown(answer) {
    this.views.get(answer)?.update();
    follow();
  }

  /** A new picture of the pool: keep what it shows of answers that are being made. */
  picture(cachesOf) {
    for (const [answer, view] of this.views) {
      if (!["waiting", "answering"].includes(answer.state)) continue;
      const caches = cachesOf(answer.name);
      if (caches.length) answer.cache = caches;
      view.drawCache();
    }
  }

  /** Show all of it; `end` scrolls to its end. */
  show(end = false) {
    const [log, box] = [byId("log"), byId("scroll")];
    const { turns } = this.conversation;
    const [top, focused] = [box.scrollTop, log.contains(document.activeElement)];
    byId("refused").hidden = true;
    byId("stop").hidden = !this.going;
    byId("send").hidden = this.going;
    const views = new Map();
    log.replaceChildren(...turns.map((turn, i) => this.turn(turn, i === turns.length - 1, views)));
    this.views = views;
    for (const view of views.values()) view.drawCache();
    byId("empty").hidden = turns.length > 0;
    box.scrollTop = top;
    follow(end);
    if (focused && !log.contains(document.activeElement)) byId("ask").focus({ preventScroll: true });
  }

  turn(turn, last, views) {
    if (turn.role !== "assistant") return this.question(turn);
    const several = turn.answers.length > 1;
    const nodes = turn.answers.map((answer, i) => {
      const take = several && last && i !== turn.chosen ? () => this.choose(turn, i) : null;
      const calls = i === turn.chosen ? (call, text) => this.result(turn, call, text) : null;
      const view = this.views.get(answer);
      const kept = view && Boolean(view.actions.take) === Boolean(take) ? view : this.view(turn, answer, take, calls);
      views.set(answer, kept);
      kept.show();
      return kept.node;
    });
    const again = button("Answer again", () => this.again(turn));
    return el(
      "article",
      { class: "turn assistant", "aria-label": "Answer" },
      el("div", { class: several ? "answers beside" : "answers" }, nodes),
      el("div", { class: "actions" }, again),
    );
  }

  view(turn, answer, take, result) {
    const attend = (index, chosen) => {
      const prompt = { messages: this.asked(turn), ...promptFields(this.conversation.settings) };
      return attention(prompt, answer, index, chosen);
    };
    return new AnswerView(answer, { take, result, attend });
  }

  question(turn) {
    const tool = turn.role === "tool";
    const text = el("p", { class: "text", dir: "auto" }, turn.content);
    const edit = tool ? [] : [button("Edit", () => this.edit(turn, node))];
    const node = el(
      "article",
      { class: `turn ${turn.role}`, "aria-label": tool ? "Result of a tool" : "Question" },
      tool ? el("p", { class: "method" }, `Result of ${turn.name}`) : null,
      text,
      el("div", { class: "actions" }, copyButton(() => turn.content), edit),
    );
    return node;
  }

  choose(turn, i) {
    turn.chosen = i;
    this.keep();
    this.show();
  }

  /** The messages that a turn answered. */
  asked(turn) {
    const { turns } = this.conversation;
    return messages({ ...this.conversation, turns: turns.slice(0, turns.indexOf(turn)) });
  }
}

/** Keep the newest text in sight, unless the reader has scrolled away from it. */
function follow(always = false) {
  const box = byId("scroll");
  const away = box.scrollHeight - box.scrollTop - box.clientHeight;
  if (always || away < 160) requestAnimationFrame(() => (box.scrollTop = box.scrollHeight));
}

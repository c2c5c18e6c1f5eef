// A conversation on the screen: asking, stopping, asking again, changing a question, going on from any token.

import { ask, attention, beginning, emptyAnswer, explanation, going } from "./ask.js";
import { AnswerView } from "./answer.js";
import { lacks, save, update } from "./conversations.js";
import { announce, button, byId, copyButton, el, whenStill } from "./dom.js";
import { fields, modelOf, problem, promptFields } from "./settings.js";
import { add, goTo, messages, path, siblings, together } from "./tree.js";

const SAVE_MS = 3000; // between two times that a running answer is saved

export class Chat {
  /** `changed` is called when the conversation's place in the list may be another. */
  constructor(conversation, changed) {
    this.conversation = conversation;
    this.changed = changed;
    this.views = new Map(); // of answers
    this.runs = new Set(); // what stops each: a fork of an answer that is being made is made beside it
    this.visible = false;
    this.saved = 0; // when
  }

  get going() {
    return this.runs.size > 0;
  }

  get turns() {
    return path(this.conversation);
  }

  /** Put it on the screen, where it was left. An answer goes on while another conversation is there. */
  open() {
    this.visible = true;
    this.show(true);
  }

  stop() {
    for (const run of this.runs) run.abort();
  }

  /** The page goes away: what was asked ends. */
  leave() {
    for (const turn of Object.values(this.conversation.turns)) if (this.going && going(turn)) turn.state = "stopped";
    this.stop();
    save(this.conversation);
  }

  /** Ask a new question. */
  async say(content) {
    if (this.going || !content.trim()) return;
    this.conversation.title ||= content.trim().slice(0, 80);
    add(this.conversation, { role: "user", content });
    await this.answer();
  }

  /** Answer the turns that there are. */
  async answer() {
    const { conversation } = this;
    const { settings, at: asked } = conversation;
    const ways = settings.compare ? ["method", "other"] : ["method"];
    const pair = settings.compare ? asked : undefined;
    const bodies = ways.map((way) => ({ messages: messages(conversation, asked), ...fields(settings, settings[way]) }));
    const answers = ways.map((way) => add(conversation, { ...emptyAnswer(settings[way], modelOf(settings)), pair: pair && `${pair} ${Date.now()}` }, asked));
    conversation.at = answers[0].id;
    await this.run(answers, bodies);
  }

  async run(answers, bodies) {
    const run = new AbortController();
    this.runs.add(run);
    const asking = answers.map((answer, i) => ask(bodies[i], answer, () => this.shown(answer), run.signal));
    this.show(true);
    this.keep();
    announce("Answering");
    await Promise.all(asking);
    this.runs.delete(run);
    this.keep();
    if (!this.visible) return;
    for (const answer of answers) this.views.get(answer)?.finished();
    this.show();
  }

  /** Answer again, beside the answer that there is. */
  async again(turn) {
    if (this.refused()) return;
    this.conversation.at = turn.parent;
    await this.answer();
  }

  /** Let the model write on where an answer was cut or stopped. */
  async goOn(turn) {
    if (!this.refused()) await this.writeOn(turn);
  }

  async writeOn(turn) {
    goTo(this.conversation, turn);
    const { settings } = this.conversation;
    const body = { messages: messages(this.conversation, turn.id), ...fields(settings, turn.method, turn.model ?? modelOf(settings)), continue_final_message: true };
    await this.run([turn], [body]);
  }

  /** Another answer that is the same up to a token, has `text` in its place, and is written on from there; also while
   * the first one is being made. */
  async branch(turn, index, { text, p, top }) {
    if (problem(this.conversation.settings, true) !== null) return;
    const before = turn.tokens.slice(0, index);
    const tokens = [...before, { text, p, top, id: undefined }];
    const { content, reasoning_content: thought = "" } = beginning(turn, tokens);
    const { thoughtTokens } = turn;
    const begun = { ...emptyAnswer(turn.method, turn.model), thought, thoughtTokens, content, tokens, count: tokens.length, forked: tokens.length };
    await this.writeOn(add(this.conversation, begun, turn.parent));
  }

  refused() {
    return this.going || problem(this.conversation.settings, true) !== null;
  }

  /** Change a question: it is asked beside the one that there is. */
  edit(turn, node) {
    if (this.going) return;
    const input = el("textarea", { "aria-label": "The question", rows: String(Math.min(12, turn.content.split("\n").length + 1)) });
    input.value = turn.content;
    const send = async () => {
      if (!input.value.trim() || this.refused()) return;
      add(this.conversation, { role: "user", content: input.value }, turn.parent);
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
  async result(turn, call, content) {
    if (this.refused()) return;
    add(this.conversation, { role: "tool", call: call.id, name: call.name, content });
    const given = new Set(this.turns.slice(this.turns.findIndex(({ id }) => id === turn.id)).map((one) => one.call));
    if (turn.calls.every(({ id }) => given.has(id))) await this.answer();
    else {
      this.keep();
      this.show();
    }
  }

  keep() {
    this.saved = Date.now();
    const kept = save(this.conversation);
    if (this.visible) byId("not-kept").hidden = kept;
    this.changed();
  }

  /** Take over what another tab has saved. Returns whether there was anything. */
  refresh() {
    const changed = update(this.conversation);
    if (!changed) return false;
    if (lacks(this.conversation)) save(this.conversation);
    this.show();
    return true;
  }

  shown(answer) {
    if (Date.now() - this.saved > SAVE_MS) this.keep();
    if (!this.visible) return;
    this.views.get(answer)?.update();
    follow();
  }

  /** A new picture of the engine: keep what it shows of answers that are being made. */
  picture(cachesOf, progressOf) {
    for (const [answer, view] of this.views) {
      if (!going(answer) || !this.going) continue;
      const caches = cachesOf(answer.name);
      if (caches.length) answer.cache = caches;
      answer.progress = progressOf(answer.name);
      view.update();
    }
  }

  /** Show all of it; `end` scrolls to its end. */
  show(end = false) {
    whenStill(this, () => this.visible && this.draw(end));
  }

  draw(end) {
    const [log, box, { activeElement }] = [byId("log"), byId("scroll"), document];
    const [top, focused] = [box.scrollTop, log.contains(activeElement)];
    byId("stop").hidden = !this.going;
    byId("send").hidden = this.going;
    const views = new Map();
    const { turns } = this;
    log.replaceChildren(...turns.map((turn) => this.turn(turn, views)));
    this.views = views;
    for (const view of views.values()) view.drawCache();
    byId("empty").hidden = turns.length > 0;
    this.showContext();
    box.scrollTop = top;
    follow(end);
    if (focused) (log.contains(activeElement) ? activeElement : byId("ask")).focus({ preventScroll: true });
  }

  showContext() {
    const usage = this.turns.findLast((turn) => turn.usage)?.usage;
    const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
    byId("context").textContent = used && Chat.room ? `${used.toLocaleString("en")} of ${Chat.room.toLocaleString("en")} tokens of context used` : "";
  }

  turn(turn, views) {
    if (turn.role !== "assistant") return this.question(turn);
    const answers = together(this.conversation, turn);
    const nodes = answers.map((answer) => {
      const old = this.views.get(answer);
      const taken = answer === turn;
      const view = old?.taken === taken ? old : this.view(answer, taken);
      views.set(answer, view);
      view.show();
      return view.node;
    });
    const again = button("Answer again", () => this.again(turn), { disabled: this.going });
    return el(
      "article",
      { class: "turn assistant", "aria-label": "Answer" },
      el("div", { class: answers.length > 1 ? "answers beside" : "answers" }, nodes),
      el("div", { class: "actions" }, again, this.others(turn)),
    );
  }

  /** What was asked, as the server counts its tokens. */
  prompt(answer) {
    return { messages: messages(this.conversation, answer.parent), ...promptFields(this.conversation.settings, answer.model ?? modelOf(this.conversation.settings)) };
  }

  view(answer, taken) {
    const view = new AnswerView(answer, {
      running: () => this.going && going(answer),
      attend: (index, chosen) => attention(this.prompt(answer), answer, index, chosen),
      explain: () => explanation(this.prompt(answer), answer, this.conversation.title),
      branch: (index, alternative) => this.branch(answer, index, alternative),
      goOn: () => this.goOn(answer),
      take: taken ? null : () => this.goTo(answer),
      result: taken ? (call, text) => this.result(answer, call, text) : null,
    });
    view.taken = taken;
    return view;
  }

  question(turn) {
    const tool = turn.role === "tool";
    const text = el("p", { class: "text", dir: "auto" }, turn.content);
    const edit = tool ? [] : [button("Edit", () => this.edit(turn, node), { disabled: this.going }), this.others(turn)];
    const node = el(
      "article",
      { class: `turn ${turn.role}`, "aria-label": tool ? "Result of a tool" : "Question" },
      tool ? el("p", { class: "method" }, `Result of ${turn.name}`) : null,
      text,
      el("div", { class: "actions" }, copyButton(() => turn.content), edit),
    );
    return node;
  }

  /** Which of several turns at one place this is, and the way to those beside it. */
  others(turn) {
    const all = siblings(this.conversation, turn);
    if (all.length < 2) return null;
    const at = all.indexOf(turn);
    const to = (i, text, label) => button(text, () => this.goTo(all[i]), { "aria-label": label, disabled: !all[i] });
    return el("span", { class: "others" }, to(at - 1, "‹", "The one before"), ` ${at + 1}/${all.length} `, to(at + 1, "›", "The next one"));
  }

  goTo(turn) {
    goTo(this.conversation, turn);
    this.keep();
    this.show();
  }
}

/** Keep the newest text in sight, unless the reader has scrolled away from it. */
function follow(always = false) {
  const box = byId("scroll");
  const away = box.scrollHeight - box.scrollTop - box.clientHeight;
  if (always || away < 160) requestAnimationFrame(() => whenStill(follow, () => (box.scrollTop = box.scrollHeight)));
}

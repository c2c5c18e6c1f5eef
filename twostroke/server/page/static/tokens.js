// The tokens of an answer: how likely each was, what else could have been there, and what it attended to.

import { showAttention } from "./attention.js";
import { button, byId, el, percent, visible } from "./dom.js";

export class TokensView {
  /** `attend(index, {layer, head})` tells what a token attended to; `branch(index, alternative)` goes on from one. */
  constructor(answer, { attend, branch }) {
    this.answer = answer;
    this.branch = branch;
    this.choice = el("div", { class: "actions" });
    this.list = el("div", { class: "tokens", role: "toolbar", "aria-label": "Tokens of the answer", dir: "auto" });
    this.attention = el("div", { class: "attention", "aria-live": "polite" });
    const hint = el("p", { class: "hint" }, "Darker is less likely. Hover or use the arrow keys for alternatives; press a token to go on from it in another way, and for what it attended to.");
    this.node = el("div", {}, hint, this.list, this.choice, this.attention);
    this.attend = attend;
    this.list.addEventListener("keydown", (event) => this.move(event));
    this.list.addEventListener("pointerover", (event) => this.hover(event.target));
    this.list.addEventListener("focusin", (event) => this.hover(event.target));
    this.list.addEventListener("pointerleave", hideAlternatives);
    this.list.addEventListener("focusout", hideAlternatives);
    this.list.addEventListener("click", (event) => this.press(event.target));
    this.show();
  }

  show() {
    const { tokens } = this.answer;
    for (let i = this.list.childElementCount; i < tokens.length; i++) {
      const { text, p } = tokens[i];
      const node = el(
        "button",
        { type: "button", class: "token", tabindex: i ? "-1" : "0", "data-index": i, "aria-describedby": "alternatives" },
        visible(text),
      );
      node.style.setProperty("--doubt", String(Math.round(100 * Math.min(1, -Math.log(Math.max(p, 1e-4)) / 5))));
      this.list.append(node);
    }
  }

  hover(node) {
    if (node.dataset.index !== undefined) showAlternatives(node, this.answer.tokens[node.dataset.index]);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hideAlternatives();
    if (!step) return;
    event.preventDefault();
    const next = this.list.children[Number(event.target.dataset.index) + step];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  press(node) {
    if (node.dataset.index === undefined) return;
    for (const one of this.list.querySelectorAll("[aria-pressed]")) one.removeAttribute("aria-pressed");
    node.setAttribute("aria-pressed", "true");
    const index = Number(node.dataset.index);
    const { text, top } = this.answer.tokens[index];
    const others = top.filter((one) => one.text !== text && !one.text.includes("\ufffd"));
    const choices = [{ ...this.answer.tokens[index], here: true }, ...others.map((one) => ({ ...one, top }))];
    const label = (one) => [one.here ? "the same: " : "", el("code", {}, visible(one.text)), ` ${percent(one.p)}`];
    const ways = choices.map((one) => button(label(one), () => this.branch(index, one)));
    // A template closes a thought before an answer goes on, so there is no going on within one.
    const within = index < (this.answer.thoughtTokens ?? 0);
    this.choice.replaceChildren(...(within ? ["This is a token of the thought, which ends before an answer goes on."] : ["Go on from here with ", ...ways]));
    showAttention(this.attention, this.answer, index, (chosen) => this.attend(index, chosen));
  }
}

function showAlternatives(node, { text, p, top }) {
  const box = byId("alternatives");
  const rows = top.some((one) => one.text === text) ? top : [{ text, p }, ...top];
  box.replaceChildren(
    ...rows.map((one) => {
      const bar = el("span", { class: "bar" });
      bar.style.setProperty("--part", `${Math.round(100 * one.p)}%`);
      return el("div", { class: one.text === text ? "is" : "" }, el("code", {}, visible(one.text)), ` ${percent(one.p)}`, bar);
    }),
  );
  box.hidden = false;
  const at = node.getBoundingClientRect();
  const left = Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 4));
  const below = at.bottom + box.offsetHeight + 6 < innerHeight;
  box.style.setProperty("left", `${left}px`);
  box.style.setProperty("top", `${below ? at.bottom + 4 : at.top - box.offsetHeight - 4}px`);
}

function hideAlternatives() {
  byId("alternatives").hidden = true;
}

// The tokens of an answer: how likely each was, what else could have been there, and what it attended to.

import { showAttention } from "./attention.js";
import { byId, el, percent, visible } from "./dom.js";

export class TokensView {
  /** `attend(index, {layer, head})` asks the server what a token attended to. */
  constructor(answer, attend) {
    this.answer = answer;
    this.list = el("div", { class: "tokens", role: "toolbar", "aria-label": "Tokens of the answer", dir: "auto" });
    this.attention = el("div", { class: "attention", "aria-live": "polite" });
    const hint = el("p", { class: "hint" }, "Darker is less likely. Hover or use the arrow keys for alternatives; press a token for what it attended to.");
    this.node = el("div", {}, hint, this.list, this.attention);
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

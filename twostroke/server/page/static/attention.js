// What a token attended to: the tokens before it, each as dark as its weight, of all layers and heads or of one.

import { el, percent, visible, whenStill } from "./dom.js";

const MOST = 6; // tokens in words

/** Fill `box` with the attention of one token of an answer; `ask({layer, head})` gets it from the server. */
export async function showAttention(box, answer, index, ask) {
  const chosen = {};
  const text = el("div", { class: "weights", dir: "auto" });
  const words = el("p", { class: "hint" }, "Computing");
  const fill = async () => {
    try {
      const found = await ask(chosen);
      if (!box.contains(text)) return; // another token was pressed meanwhile
      whenStill(box, () => {
        words.textContent = inWords(found);
        text.replaceChildren(...weighed(found));
      });
      return found;
    } catch (error) {
      words.replaceChildren(el("span", { class: "error", role: "alert" }, error.message));
    }
  };
  const choice = (name, indices) => {
    const pick = ({ target }) => {
      if (target.value === "") delete chosen[name];
      else chosen[name] = Number(target.value);
      fill();
    };
    const options = indices.map((i) => el("option", { value: i }, `${name} ${i}`));
    return el("select", { "aria-label": name, change: pick }, el("option", { value: "" }, `all ${name}s`), options);
  };
  const plain = answer.method === "plain" ? "" : ` The answer was made by ${answer.method}; this is what a plain pass over the same tokens attends to.`;
  const head = el("p", {}, "What ", el("code", {}, visible(answer.tokens[index].text)), ` attended to.${plain} `);
  box.replaceChildren(head, words, text);
  const found = await fill();
  if (found) head.append(choice("layer", found.layers), " ", choice("head", [...Array(found.num_heads).keys()]));
}

/** The first token takes what nothing else asks for (a sink): the colours are relative to the largest of the others. */
function weighed({ texts, weights }) {
  const most = Math.max(...weights.slice(1), 1e-6);
  return texts.map((text, i) => {
    const node = el("span", { class: "weighed", title: percent(weights[i]) }, visible(text));
    node.style.setProperty("--weight", String(Math.round(Math.min(100, (100 * weights[i]) / most))));
    return node;
  });
}

function inWords({ texts, weights }) {
  const order = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a]);
  const named = order.slice(0, MOST).map((i) => `${visible(texts[i])} (${i}) ${percent(weights[i])}`);
  return `Most: ${named.join(", ")}.`;
}

// Files that go with a question, as text: dropped, pasted or chosen.

import { json } from "./api.js";
import { announce, button, byId, el, whenStill } from "./dom.js";

const MAX_BYTES = 4 << 20;

export class Attachments {
  /** `model()` names the one that counts tokens. */
  constructor(model) {
    this.model = model;
    this.files = []; // {name, text, tokens}
    this.show();
    const main = document.querySelector("main");
    main.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    main.addEventListener("drop", (event) => this.taken(event, event.dataTransfer.files));
    byId("ask").addEventListener("paste", (event) => this.taken(event, event.clipboardData.files));
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", async ({ target }) => {
      await this.add(target.files);
      target.value = "";
    });
  }

  taken(event, files) {
    if (!files.length) return;
    event.preventDefault();
    this.add(files);
  }

  async add(files) {
    for (const file of files) {
      const one = { name: file.name, text: null, tokens: null, error: "" };
      this.files.push(one);
      this.show();
      try {
        if (file.size > MAX_BYTES) throw new Error(`it is larger than ${MAX_BYTES >> 20} MB`);
        one.text = await read(file);
        one.tokens = (await json("/tokenize", { body: { model: this.model(), prompt: one.text, add_special_tokens: false } })).count;
        announce(`${one.name}: ${one.tokens} tokens`);
      } catch (error) {
        one.error = error.message;
      }
      this.show();
    }
  }

  /** A question with the files after it; they are taken away here. */
  take(question) {
    const parts = this.files.filter(({ text }) => text !== null).map(({ name, text }) => {
      const fence = "`".repeat(Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length)) + 1);
      return `${name}:\n\n${fence}\n${text.trimEnd()}\n${fence}`;
    });
    this.files = [];
    this.show();
    return [question, ...parts].filter((part) => part.trim()).join("\n\n");
  }

  show() {
    whenStill(this, () => this.draw());
  }

  draw() {
    byId("files").replaceChildren(
      ...this.files.map((one) => {
        const about = one.error || (one.tokens === null ? "reading" : `${one.tokens.toLocaleString("en")} tokens`);
        const drop = () => {
          this.files = this.files.filter((other) => other !== one);
          this.show();
        };
        const text = el("span", { class: one.error ? "error" : "" }, `${one.name}: ${about}`);
        return el("li", { dir: "auto" }, text, button("×", drop, { "aria-label": `Leave out ${one.name}` }));
      }),
    );
  }
}

async function read(file) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error("it is no text in UTF-8");
  }
  if (text.includes("\0")) throw new Error("it is no text");
  return text;
}

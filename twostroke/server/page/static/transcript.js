// A conversation as Markdown, for people: what is on the screen. It can be read back.

import { emptyAnswer } from "./ask.js";
import { add, newId, path } from "./tree.js";

const NAMES = { user: "Question", assistant: "Answer", tool: "Result of a tool" };
const HEADING = /^## (Question|Answer|Result of a tool)$/m;
const LOOKS_SO = /^(\\*)(?=## (?:Question|Answer|Result of a tool)$)/gm; // a line of a text: it gets a backslash
const CALL = /(?:^|\n\n)```json\n([\w.-]+)\(((?:(?!\n```)[^])*)\)\n```$/;

export function asMarkdown(conversation) {
  const turns = path(conversation).map(({ role, content, calls }) => {
    const made = (calls ?? []).map((call) => `\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``);
    return [`## ${NAMES[role]}`, content.replace(LOOKS_SO, "\\$1"), ...made].filter(Boolean).join("\n\n");
  });
  return `# ${conversation.title.replace(/\s+/g, " ")}\n\n${turns.join("\n\n")}\n`;
}

/** Fill a fresh conversation from such a text. Returns null for another text. */
export function fromMarkdown(text, conversation) {
  const [head, ...parts] = text.replaceAll("\r\n", "\n").split(HEADING);
  const title = /^# (.+)/.exec(head)?.[1];
  if (!title || !parts.length) return null;
  conversation.title = title;
  const waiting = []; // calls without a result
  for (let i = 0; i < parts.length; i += 2) {
    const content = parts[i + 1].trim();
    if (parts[i] === NAMES.user) add(conversation, { role: "user", content: plain(content) });
    else if (parts[i] === NAMES.assistant) {
      const [said, calls] = withoutCalls(content);
      waiting.push(...calls);
      add(conversation, { ...emptyAnswer("plain"), content: plain(said), calls, state: "done" });
    } else {
      const { id: call, name } = waiting.shift() ?? { id: newId(), name: "tool" };
      add(conversation, { role: "tool", call, name, content: plain(content) });
    }
  }
  return conversation;
}

const plain = (text) => text.replace(/^\\(?=\\*## (?:Question|Answer|Result of a tool)$)/gm, "");

function withoutCalls(text) {
  const calls = [];
  for (let found; (found = CALL.exec(text)); text = text.slice(0, found.index)) {
    calls.unshift({ id: `call_${newId()}`, name: found[1], arguments: found[2] });
  }
  return [text, calls];
}

// A conversation as a tree of turns. Nothing in it is ever lost: another question or another answer is a sibling.
//
// conversation: {id, title, settings, turns: {id: turn}, at}, `at` being the last turn on the screen, or null
// turn: {id, parent, role, content}; an answer has more (ask.js), and a `pair` if two ways were asked at once

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Add a turn after another one, and go there. */
export function add(conversation, turn, parent = conversation.at) {
  const added = { id: `t${newId()}`, parent, ...turn };
  conversation.turns[added.id] = added;
  conversation.at = added.id;
  return conversation.turns[added.id];
}

/** The turns from the first to one of them. */
export function path(conversation, id = conversation.at) {
  const made = [];
  for (let turn = conversation.turns[id]; turn; turn = conversation.turns[turn.parent]) made.unshift(turn);
  return made;
}

const after = (conversation, id) => Object.values(conversation.turns).filter(({ parent }) => parent === id);

/** The answers of one asking: two where two ways were asked, else the one. */
export function together(conversation, turn) {
  return turn.pair ? after(conversation, turn.parent).filter(({ pair }) => pair === turn.pair) : [turn];
}

/** What stands at a turn's place, itself included; of two ways, the one on the screen or the first. */
export function siblings(conversation, turn) {
  const all = after(conversation, turn.parent);
  return all.filter((one, i) => one === turn || !one.pair || (one.pair !== turn.pair && all.findIndex(({ pair }) => pair === one.pair) === i));
}

/** Show a turn, and what came after it last. */
export function goTo(conversation, turn) {
  for (let next = turn; next; ) {
    conversation.at = next.id;
    const [last, ...others] = after(conversation, next.id).reverse();
    next = last?.pair ? (others.find(({ pair, id }) => pair === last.pair && after(conversation, id).length) ?? last) : last;
  }
}

/** The messages up to a turn, as the API has them. Answers that nothing came of are left out. */
export function messages(conversation, id = conversation.at) {
  const { system } = conversation.settings;
  const made = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of path(conversation, id)) {
    if (turn.role === "tool") made.push({ role: "tool", content: turn.content, tool_call_id: turn.call });
    else if (turn.role === "assistant") {
      const calls = turn.state === "done" ? turn.calls : [];
      const sent = calls.map(({ id: call, name, arguments: args }) => ({ id: call, type: "function", function: { name, arguments: args } }));
      const thought = turn.thought ? { reasoning_content: turn.thought } : {}; // the template says whether it is read
      if (turn.content || sent.length) made.push({ role: "assistant", content: turn.content, ...thought, ...(sent.length ? { tool_calls: sent } : {}) });
    } else if (made.at(-1)?.role === "user") made.at(-1).content += `\n\n${turn.content}`; // templates want turns in turn
    else made.push({ role: "user", content: turn.content });
  }
  return made;
}

// One question to the server, and the answer as it comes.

import { call, events, json, reason } from "./api.js";
import { newId } from "./tree.js";

/** An answer that nothing has come of yet. */
export function emptyAnswer(method, model) {
  return { role: "assistant", method, model, thought: "", content: "", calls: [], tokens: [], count: 0, state: "waiting" };
}

export const going = ({ state }) => state === "waiting" || state === "answering";

/**
 * Ask, and fill `answer` until it is complete, stopped or failed; what comes is added to what is there. `changed` is
 * called with every piece. `answer.state` is then "done", "stopped" or "failed", with the server's message in
 * `answer.error`.
 */
export async function ask(body, answer, changed, signal) {
  const began = performance.now();
  Object.assign(answer, { name: `page-${newId()}`, state: "waiting", finish: undefined, error: undefined, first: undefined, usage: undefined });
  try {
    const whole = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await call("/v1/chat/completions", { body: whole, signal, headers: { "x-request-id": answer.name } });
    if (!response.ok) throw new Error(await reason(response));
    for await (const { data } of events(response)) {
      if (data.error) throw new Error(data.error.message);
      take(data, answer, began);
      changed();
    }
    if (!answer.finish) throw new Error("the stream ended before the answer did: the server may have stopped");
    answer.state = "done";
  } catch (error) {
    answer.state = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.error = error instanceof TypeError ? "the server cannot be reached" : error.message;
  }
  answer.seconds = (performance.now() - began) / 1e3;
  changed();
}

/** Add a chunk to an answer. */
function take(data, answer, began) {
  if (data.warnings) answer.warnings = data.warnings;
  if (data.usage) {
    answer.usage = data.usage;
    answer.made = (answer.made ?? answer.forked ?? 0) + data.usage.completion_tokens;
  }
  const [choice] = data.choices;
  if (!choice) return;
  const { delta } = choice;
  if (delta.reasoning_content) answer.thought += delta.reasoning_content;
  if (delta.content) answer.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" });
    known.arguments += call.function.arguments ?? "";
  }
  const ids = choice.token_ids ?? [];
  if (choice.logprobs?.content) answer.tokens.push(...choice.logprobs.content.map((one, i) => token(one, ids[i])));
  if (answer.thought && !answer.content) answer.thoughtTokens = answer.tokens.length;
  if (delta.role === undefined) answer.count += 1;
  if (answer.state === "waiting") answer.progress = ""; // what the last picture said is over
  answer.state = "answering";
  answer.first ??= performance.now() - began;
  if (choice.finish_reason) {
    answer.finish = choice.finish_reason;
    answer.timings = choice.timings;
    answer.counted = choice.method_facts;
  }
}

/** The message of an answer that begins with these tokens of another one. A template writes the thought before it. */
export function beginning({ thought, thoughtTokens = 0 }, tokens) {
  const content = tokens.slice(thoughtTokens).map(({ text }) => text).join("");
  return thoughtTokens ? { content: content.trimStart() || content, reasoning_content: thought } : { content };
}

function token({ token: text, logprob, top_logprobs: top }, id) {
  return { id, text, p: Math.exp(logprob), top: top.map((one) => ({ text: one.token, p: Math.exp(one.logprob) })) };
}

/** The walk through an answer, as the text of a page: a plain pass over the same tokens, with all of it shown. */
export async function explanation(prompt, answer, title) {
  const { tokens } = await json("/tokenize", { body: prompt });
  const all = await tokensBefore(prompt, answer, answer.tokens.length);
  if (tokens.some((id, i) => id !== all[i])) throw new Error("the chat template writes the prompt of this beginning in another way");
  const response = await call("/explain", { body: { model: prompt.model, tokens, answer: all.slice(tokens.length), title } });
  if (!response.ok) throw new Error(await reason(response));
  return response.text();
}

/** What the model attended to when it wrote a token of an answer, as a plain pass over the same tokens does. */
export async function attention(prompt, answer, index, chosen) {
  return json("/attention", { body: { model: prompt.model, tokens: await tokensBefore(prompt, answer, index), ...chosen } });
}

/** The ids of a prompt and of the first `count` tokens of its answer. The beginning of a fork is read as a text. */
async function tokensBefore(prompt, answer, count) {
  const some = answer.tokens.slice(0, count);
  const begun = count >= answer.forked ? answer.forked : some.findLastIndex(({ id }) => id === undefined) + 1;
  const messages = [...prompt.messages, { role: "assistant", ...beginning(answer, some.slice(0, begun)) }];
  const body = begun ? { ...prompt, messages, continue_final_message: true } : prompt;
  const { tokens } = await json("/tokenize", { body });
  return [...tokens, ...some.slice(begun).map(({ id }) => id)];
}

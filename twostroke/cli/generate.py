"""`twostroke generate`: answer one prompt."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.method_options import MethodOptions
from twostroke.cli.options import JsonFlag, ModelOptions, SamplingOptions, option, spread
from twostroke.cli.prompt import PromptOptions
from twostroke.cli.report import AnswerWriter, cut_text, note, pace_text, print_json, size, tier_hits_text, write
from twostroke.fields import rules
from twostroke.sampling.params import SamplingParams

if TYPE_CHECKING:
    from twostroke.api.llm import LLM
    from twostroke.engine.output import Token
    from twostroke.engine.request import Request


@spread
def generate(
    *,
    asked: PromptOptions,
    passage_budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most tokens that the passages of the prompt may take: parts between blank lines but the last, which "
            "is the question.",
            show_default="all",
        ),
    ] = None,
    n: Annotated[int, option(rules(SamplingParams)["n"], "--n", "-n")] = SamplingParams.n,
    logprobs: Annotated[int | None, option(rules(SamplingParams)["logprobs"])] = SamplingParams.logprobs,
    as_json: JsonFlag = False,
    model_options: ModelOptions,
    sampling: SamplingOptions,
    method_options: MethodOptions,
) -> None:
    """Answer one prompt, greedily unless told otherwise; the text goes to stdout as it is made, facts to stderr.

    The model's own generation defaults are not used here: `chat` and `serve` use them.
    """
    from twostroke.api.reasoning.reasoning import parts_reader
    from twostroke.backends.native.library import unavailable
    from twostroke.models.checkpoints.chat_tokens import ChatTokens

    text = asked.read()
    params = sampling.params(n=n, logprobs=logprobs)
    method = method_options.build()
    model_options.check_companions(method)
    with model_options.open() as llm:
        if passage_budget is not None:
            text = cut(llm, text, passage_budget)
        tokens = asked.tokens(llm, text)
        if isinstance(tokens, ChatTokens):
            params = llm.chat_params(tokens, params)

        streaming = n == 1 and not as_json
        decoding = llm.stream(tokens, params, method=method)
        choices: list[list[Token]] = [[] for _ in range(n)]
        writer, parts = AnswerWriter(sys.stdout), parts_reader(params)
        for token in decoding:
            choices[token.choice].append(token)
            if streaming:
                writer.write(*parts(token.text, token.finish_reason is not None))
        facts = describe(llm, decoding.request, choices, method_options.method)
        if as_json:
            print_json({"model": llm.name, "prompt": text, **facts})
            return
        if streaming:
            write("\n")
        else:
            for output in facts["outputs"]:
                write(f"[{output['index'] + 1}] {output['text']}\n")
        if logprobs is not None:
            print_logprobs(facts["outputs"])
        note(facts_line(decoding.request, facts))
        for output in facts["outputs"]:
            if output["finish_reason"] == "length":
                note(cut_text(len(output["token_ids"]), params.max_tokens))
        if reason := unavailable():
            note(f"without native kernels: {reason}")


def cut(llm: "LLM", text: str, budget: int) -> str:
    """The text with its passages cut to a budget; what was cut is told on stderr."""
    from twostroke.api.conversation.fitting import cut_passages

    [message], left_out = cut_passages([{"role": "user", "content": text}], budget, llm.tokenizer)
    if left_out:
        note(left_out.text)
    return message["content"]


def describe(llm: "LLM", request: "Request", choices: "list[list[Token]]", method: str) -> dict[str, Any]:
    """All facts of a finished request, for JSON."""
    from twostroke.api.reasoning.reasoning import set_apart
    from twostroke.engine.timings import DEFINITIONS, Pace
    from twostroke.kv.pages import TIERS
    from twostroke.methods.method import method_facts

    outputs = [
        {
            "index": index,
            "thought": thought,
            "text": answer,
            "token_ids": [token.id for token in tokens],
            "finish_reason": tokens[-1].finish_reason if tokens else None,
            "logprobs": None if request.params.logprobs is None else [logprob(llm, token) for token in tokens],
        }
        for index, tokens in enumerate(choices)
        for thought, answer in [set_apart("".join(token.text for token in tokens), request.params)]
    ]
    return {
        "method": method,
        "method_facts": method_facts(request.result) or None,
        "backend": llm.backend.label,
        **{key: outputs[0][key] for key in ("thought", "text", "token_ids", "finish_reason")},
        "outputs": outputs,
        "prompt_tokens": request.prompt_tokens,
        "prefilled_tokens": request.prefilled_tokens,
        "cached_tokens": request.cached_tokens,
        "cached_tokens_by_tier": {tier: request.cached_by_tier[tier] for tier in TIERS},
        "output_tokens": sum(len(tokens) for tokens in choices),
        **Pace.of(request.timings, request.prefilled_tokens - request.cached_tokens).as_dict(),
        "total_output_tokens_per_second": total_rate(request, sum(len(tokens) for tokens in choices)),
        "kv_bytes": request.kv_bytes,
        "definitions": DEFINITIONS,
    }


def total_rate(request: "Request", tokens: int) -> float | None:
    """Tokens per second of all answers together, from the first token to the end."""
    times = request.timings
    if not times.tokens or times.finished is None or times.finished <= times.tokens[0]:
        return None
    return (tokens - len(request.choices)) / (times.finished - times.tokens[0])


def logprob(llm: "LLM", token: "Token") -> dict[str, Any]:
    """A token's log-probability and its alternatives'."""
    text = llm.tokenizer.token_text
    top = [{"id": id, "text": text(id), "logprob": value} for id, value in token.top_logprobs or ()]
    return {"id": token.id, "text": text(token.id), "logprob": token.logprob, "top": top}


def print_logprobs(outputs: list[dict[str, Any]]) -> None:
    """A line for each token: itself and its alternatives."""
    for output in outputs:
        for token in output["logprobs"]:
            top = "  ".join(f"{other['text']!r} {other['logprob']:.3f}" for other in token["top"])
            note(f"{token['logprob']:8.3f}  {token['text']!r}" + (f"    of  {top}" if top else ""))


def facts_line(request: "Request", facts: dict[str, Any]) -> str:
    """One line for people."""
    from twostroke.engine.timings import Pace

    cached = f" ({found})" if (found := tier_hits_text(facts["cached_tokens_by_tier"])) else ""
    parts = [f"{facts['prompt_tokens']} prompt{cached} + {facts['output_tokens']} output tokens"]
    parts.append(pace_text(Pace.of(request.timings, request.prefilled_tokens - request.cached_tokens)))
    if (total := facts["total_output_tokens_per_second"]) is not None and len(facts["outputs"]) > 1:
        parts.append(f"{len(facts['outputs'])} answers at {total:.1f} tok/s in all")
    counts = {key: value for key, value in (facts["method_facts"] or {}).items() if isinstance(value, int)}
    parts.append(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in counts.items()))
    parts += [f"KV {size(facts['kv_bytes'])}", facts["backend"]]
    return " | ".join(part for part in parts if part)

"""From what a body asks for to the engine's requests.

Runs off the event loop, since templates and tokenization take time.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.api.conversation.fitting import LeftOut
from twostroke.api.llm import LLM
from twostroke.api.receipts import describable
from twostroke.engine.request import Request
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.methods import METHODS, Method, Plain, method
from twostroke.models.checkpoints.chat_passages import encode_chat
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.models.checkpoints.infill import NO_INFILL
from twostroke.sampling.params import SamplingParams
from twostroke.server import tools
from twostroke.server.contexts.context import Context
from twostroke.server.errors import ApiError, invalid, to_api_error
from twostroke.server.tenants.tenant import current_tenant

TEMPLATE_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}  # set by the server
_NONE = re.compile(r"""['"]none['"]""")


@dataclass(frozen=True)
class Prepared:
    """A body, ready for the engine."""

    requests: list[Request]  # one for each prompt
    prompts: Sequence[Sequence[int]]  # their token ids
    warnings: list[str] = field(default_factory=list)  # what will not be done as the body asks, a sentence each
    left_out: LeftOut = field(default_factory=LeftOut)  # what the prompt is without
    receipt: bool = False  # whether the answers get receipts


def choose_method(
    served: str, model: str | None, chosen: str | dict[str, Any] | None, default: str = "plain"
) -> Method:
    """The technique that a body names, by itself or by the model's alias `NAME:METHOD`, or the default.

    Ollama's clients put the tag `:latest` behind every name, on the other APIs' routes too.

    Raises ApiError: 404 for another model, 400 for an unknown method or parameter, 403 for what the call's key may not
    use.
    """
    alias = None
    asked = served if model is None else model if model == served else model.removesuffix(":latest")
    if asked != served:
        name, _, alias = asked.rpartition(":")
        if name != served or alias not in METHODS:
            message = f"there is no model {model!r:.100}; there is {served!r}, alone or as {served}:METHOD"
            raise ApiError(404, message, param="model", code="model_not_found")
    parameters = {"name": chosen} if isinstance(chosen, str) else dict(chosen or {})
    named = parameters.pop("name", alias or default)
    try:
        if not isinstance(named, str):
            raise InvalidRequest(f"a method's name is a text, not {named!r:.60}")
        technique = method(named, **parameters)
    except InvalidRequest as error:
        raise invalid(error, "method") from None
    for one in technique.techniques:
        current_tenant().require(served, one)
    return technique


def require_plain(technique: Method, what: str, param: str) -> None:
    """A window is a program of its own, and a receipt describes no other. Raises ApiError."""
    if technique != Plain():
        raise ApiError(400, f"{what} for plain generation: leave out method", param=param)


def with_receipt(params: SamplingParams, technique: Method) -> SamplingParams:
    """The parameters of an answer that gets a receipt. Raises ApiError or InvalidRequest if there can be none."""
    require_plain(technique, "a receipt is made", "receipt")
    describable(params)
    return replace(params, logprobs=params.logprobs or 0)


def check_length(llm: LLM, tokens: int) -> None:
    """Raise ApiError for a prompt that leaves no room for a token of the answer."""
    try:
        llm.model.require_room(tokens)
    except ContextLengthExceeded as error:
        raise to_api_error(error) from None


def check_size(llm: LLM, text: str) -> None:
    """Raise ApiError for a text that is certainly longer than the context, which takes no tokenization to tell."""
    most = llm.max_model_len
    if len(text) > 8 * most and (least := llm.tokenizer.least_tokens(text)) > most:
        message = f"the prompt has {len(text):,} characters, so at least {least:,} tokens; there is room for {most:,}"
        raise ApiError(400, f"{message}: shorten it", code="context_length_exceeded")


def engine_requests(
    llm: LLM,
    prompts: Iterable[Sequence[int]],
    params: SamplingParams,
    technique: Method,
    context: Context | None = None,
    salt: bytes = b"",
) -> list[Request]:
    """A request for each prompt, which may begin with a context. Raises ApiError or InvalidRequest.

    With a salt they share KV with requests of the same salt alone.
    """
    made: list[Request] = []
    for tokens in prompts:
        check_length(llm, len(tokens))
        request = llm.request(tokens, params, technique)
        request.cache_salt = salt
        if context is not None:
            request.make_program = context.with_context(llm, tokens, request.make_program, salt)
        made.append(request)
    return made


def chat_tokens(
    llm: LLM,  # the model
    messages: Sequence[Mapping[str, Any]],  # as chat templates expect them
    # those that the model may call, each as {"name", "description", "parameters"}
    functions: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,  # further variables of the template
    *,
    add_generation_prompt: bool = True,  # whether the beginning of an answer follows the messages
    continue_final_message: bool = False,  # whether the answer continues the last message
    cut: bool = False,  # whether a prompt that is too long will be cut, and so must not be refused
    # texts of named contexts, for the places that messages have for them (`chat_passages`)
    passages: Sequence[str] = (),
) -> ChatTokens:
    """A conversation through the chat template.

    Raises:
        InvalidRequest: there is no template, or it refuses. ApiError: a variable is one that the server sets.
    """
    if taken := TEMPLATE_VARIABLES & set(variables or {}):
        raise ApiError(400, f"{min(taken)} is set by the server: leave it out", param="chat_template_kwargs")
    ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    values = {**(variables or {}), **ends}
    if values.get("reasoning_effort") == "none" and not _NONE.search(llm.tokenizer.template_for(bool(functions)) or ""):
        del values["reasoning_effort"]  # gpt-oss's would write any level into the prompt
    messages, offered = tools.prompt_messages(llm.tokenizer, messages, functions, values)
    if not cut and sum(len(str(message.get("content"))) for message in messages) > 8 * llm.max_model_len:
        check_size(llm, llm.tokenizer.chat(messages, tools=offered, **values))
    return encode_chat(llm.tokenizer, messages, passages, tools=offered, **values)


def truncated(llm: LLM, tokens: list[int], most: int | None) -> list[int]:
    """The last `most` tokens of a prompt: all for None, and what the context holds besides a token for -1."""
    if most is None or (most := llm.max_model_len - 1 if most < 0 else most) >= len(tokens):
        return tokens
    return tokens[len(tokens) - most :]


def infill_prompt(
    llm: LLM, prefix: str | Sequence[int], suffix: str, extra: Sequence[tuple[str, str]] = (), most: int | None = None
) -> list[int]:
    """The prompt for what stands between two texts (`Tokenizer.encode_infill`). Takes long: off the event loop.

    Raises ApiError if the model has no tokens for it, or if the texts are certainly too long.
    """
    if llm.tokenizer.infill is None:
        raise ApiError(400, NO_INFILL, param="suffix", code="no_infill")
    for text in (prefix, suffix):
        if isinstance(text, str):
            check_size(llm, text)
    return llm.tokenizer.encode_infill(prefix, suffix, extra, most)


def infill_ends(llm: LLM, params: SamplingParams) -> SamplingParams:
    """The parameters of an answer that the tokens of fill-in-the-middle end as well."""
    infill = llm.tokenizer.infill
    if infill is None or params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(infill.ends)))

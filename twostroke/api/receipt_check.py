"""The check of a receipt.

It enters the answer's tokens as guesses, several in a pass, and draws behind each one, as speculative decoding does. If
every draw is the token that the receipt has, with the same log-probabilities to the bit, then these weights, this
arithmetic and these options give this answer.
"""

import time
from dataclasses import dataclass
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.reasoning.reasoning import applied_again
from twostroke.api.receipts import PURPOSE, STRETCH, Receipt, Remake, digest, stretches
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams
from twostroke.system.user_key import sealed

GUESSES = 64  # tokens that a pass of a check enters


@dataclass(frozen=True)
class ReceiptCheck:
    """What a check of a receipt found.

    Attributes:
        wrong: what is not as the receipt says, a sentence; None if all of it is: "the same bits".
        sealed: whether one of this user's keys made the seal; None for a receipt without one.
        seconds: what computing took; None if it did not come to that.
    """

    wrong: str | None
    sealed: bool | None
    seconds: float | None = None


def verify(llm: LLM, receipt: Receipt, remake: Remake | None = None) -> ReceiptCheck:
    """Check a receipt with the model that is open: what it says of itself, and then the answer, which is computed.

    Args:
        llm: the model.
        receipt: what is checked.
        remake: makes a grammar of its description, such as `server.grammar.Grammars.remake`.

    Raises:
        InvalidRequest: options that no request can have, or a grammar without `remake`.
    """
    own = None if receipt.seal is None else sealed(receipt.content, PURPOSE, receipt.seal)
    if wrong := _inconsistency(receipt) or _other_model(llm, receipt):
        return ReceiptCheck(wrong, own)
    began = time.perf_counter()
    wrong = _recomputed(llm, receipt, remake)
    return ReceiptCheck(wrong, own, time.perf_counter() - began)


def _inconsistency(receipt: Receipt) -> str | None:
    if digest(list(receipt.prompt)) != receipt.prompt_digest:
        return "the prompt was altered: its digest is another"
    if digest(receipt.options) != receipt.options_digest:
        return "the options were altered: their digest is another"
    if len(receipt.logprobs) != -(-len(receipt.tokens) // STRETCH):
        return f"the tokens were altered: {len(receipt.logprobs)} digests are not those of {len(receipt.tokens)} tokens"
    return None


def _other_model(llm: LLM, receipt: Receipt) -> str | None:
    if receipt.identity == llm.model.id:
        return None
    what = "another arithmetic or other weights" if receipt.backend != llm.backend.label else "other weights"
    return (
        f"it was made by {what}: {receipt.model} on {receipt.backend}, identity {receipt.identity[:16]}; this is "
        f"{llm.name} on {llm.backend.label}, identity {llm.model.id[:16]}"
    )


def _recomputed(llm: LLM, receipt: Receipt, remake: Remake | None) -> str | None:
    """What is wrong with the answer; None if all of it comes out again."""
    options: dict[str, Any] = dict(receipt.options)
    choice, grammar, thought = (options.pop(name, None) for name in ("choice", "grammar", "thought"))
    if grammar is not None:
        if remake is None or not isinstance(grammar, dict):
            raise InvalidRequest("the receipt's answer follows a grammar: say how to make it, or use twostroke verify")
        options["constraint"] = remake(grammar)
    try:
        for name in ("stop", "stop_token_ids"):
            options[name] = tuple(options.get(name, ()))
        options["logit_bias"] = {int(id): bias for id, bias in options.get("logit_bias", {}).items()}
        params = SamplingParams(**options, logprobs=0)
        if thought is not None:
            params = applied_again(thought, params, llm.tokenizer, llm.config.vocab_size)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"the receipt's options are none of a request: {error}") from None
    claimed = receipt.tokens

    def program() -> Program:
        run: Decoded = yield Decode((yield Prefill(llm.encode(receipt.prompt), fresh=True)), max_tokens=1)
        made = list(run.tokens)
        while run.finish_reason is None and made == list(claimed[: len(made)]) and len(made) < len(claimed):
            guesses = claimed[len(made) : len(made) + GUESSES]
            run = yield Decode(run.kv, guesses=guesses, max_tokens=len(guesses))
            made += run.tokens

    request = Request(program, params, llm.tokenizer, len(receipt.prompt))
    if choice is not None and (type(choice) is not int or choice < 0):
        raise InvalidRequest(f"the receipt's options are none of a request: choice {choice!r:.40}")
    request.first_choice = choice or 0
    llm.engine.run([request])
    made = list(request.events)
    text = llm.tokenizer.token_text
    for index, token in enumerate(made[: len(claimed)]):
        if token.id != claimed[index]:
            was = f" ({text(claimed[index])!r})" if claimed[index] < llm.config.vocab_size else ""
            theirs = f"the receipt has {claimed[index]}{was}"
            return f"token {index} differs: {theirs}, and the model says {token.id} ({text(token.id)!r})"
    if len(made) < len(claimed):
        return f"the answer has {len(claimed)} tokens in the receipt, and ends after {len(made)}"
    found = stretches([float(token.logprob or 0.0) for token in made[: len(claimed)]])
    for index, (mine, theirs) in enumerate(zip(found, receipt.logprobs, strict=True)):
        if mine != theirs:
            first, last = index * STRETCH, min(len(claimed), (index + 1) * STRETCH) - 1
            return f"the log-probabilities of tokens {first} to {last} differ, though the tokens are the same"
    if (reason := made[-1].finish_reason) != receipt.finish_reason:
        ends = "goes on" if reason is None else f"ends with {reason}"
        return f"the receipt's answer ends with {receipt.finish_reason} after {len(claimed)} tokens; it {ends}"
    return None

"""Compose: a technique makes the prompt, another one drops entries of it.

The first technique's strokes run up to its first decode, and what it would decode from is the prompt of the second: so
the prompt may be repeated (in whole or its surprising tokens alone), read again or compressed, and then entries dropped
by any score. PTDO names compression as future work; repetition can also drop by itself (`keydiff` with `times=2`).
A prefill of the second technique goes on behind the entries that the first has made, so only a score that needs the
queries of all tokens computes them again.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from twostroke.engine.strokes import Decode, Prefill, Program, ReadWeights, driven
from twostroke.errors import InvalidRequest
from twostroke.fields import parsed_value, text
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt
from twostroke.methods.registry import method_of


@dataclass(frozen=True)
class Compose(Method, name="compose"):
    """Prefill as one technique does, and decode as another does with its prompt."""

    # the technique that makes the prompt, as NAME or NAME:KEY=VALUE+KEY=VALUE. It keeps all it prefills.
    first: str = text("repeat:keep=all", least=1)
    then: str = text("snap", least=1)  # the technique that chooses among its entries

    def __post_init__(self) -> None:
        super().__post_init__()
        tuple(self.parts)

    @property
    def parts(self) -> Iterator[Method]:
        """Both techniques. Raises InvalidRequest for an unknown name or parameter."""
        for field, given in (("first", self.first), ("then", self.then)):
            name, _, rest = given.partition(":")
            self.require(field, name != self.name, "another technique")
            pairs = [pair.partition("=") for pair in rest.split("+")] if rest else []
            yield method_of(name, {key: parsed_value(value) for key, _, value in pairs})

    @property
    def techniques(self) -> tuple[str, ...]:
        return (self.name, *(one.name for one in self.parts))

    @property
    def companions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for one in self.parts for role in one.companions))

    @property
    def by_head(self) -> bool:
        return any(one.by_head for one in self.parts)

    @property
    def biased(self) -> bool:
        return any(one.biased for one in self.parts)

    @property
    def makes_entries(self) -> bool:
        return any(one.makes_entries for one in self.parts)

    @property
    def goes_on(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        _, then = self.parts
        return then.goes_on

    def program(self, prompt: Prompt) -> Program:
        first, then = self.parts
        known = [(yield from self.made(first.program(prompt)))]

        def answer(asked: Any) -> Program:
            return (yield continued(asked, known.pop()) if known else asked)

        return (yield from driven(then.program(prompt.with_tokens(known[0].tokens)), answer))

    def made(self, program: Program) -> Generator[Any, Any, KVCache]:
        """What a technique would decode from. For `yield from`."""
        results: list[Any] = [None]
        try:
            while True:
                asked = program.send(results.pop())
                if isinstance(asked, Decode):
                    kv = asked.kv
                    if kv.head_positions is None and kv.pending is None and kv.next_position == len(kv):
                        return kv
                    break
                strokes = asked if isinstance(asked, list) else [asked]
                if not all(isinstance(one, Prefill | ReadWeights) for one in strokes):
                    break
                results.append((yield asked))
        except StopIteration:
            pass
        finally:
            program.close()
        raise InvalidRequest(f"{self.name}: {self.first} must keep all that it prefills, as repeat:keep=all does")


def continued(asked: Any, kv: KVCache) -> Any:
    """A prefill from position 0 as one behind the entries that it shares with a value."""
    if not isinstance(asked, Prefill) or asked.after is not None or asked.model is not None:
        return asked
    if asked.logits == "all" or asked.logprobs is not None or asked.dropout is not None or asked.fresh:
        return asked
    needed = max(1, asked.queries or 0, asked.states or 0, asked.hidden or 0)  # rows that have to be computed
    count = min(len(asked.tokens), len(kv)) - needed
    if count <= 0 or list(asked.tokens[:count]) != list(kv.tokens[:count]):
        return asked
    return replace(asked, tokens=asked.tokens[count:], after=kv[:count])

"""Messages as bytes, by pickle. Both ends are one program, and nobody else has the sockets between them.

What both processes have goes by its name: the tokenizer, the embedder, the model. A grammar goes as its text, and is
compiled where it is followed. A KV value never leaves the engine's process: the server gets a `RemoteValue` for it.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from itertools import count
from operator import attrgetter
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.reasoning.constraint import ReasoningTokens
from twostroke.api.reasoning.forms import FORMS
from twostroke.engine.output import Token
from twostroke.kv.cache import KVCache
from twostroke.server.grammar import CompiledGrammar, Grammar, Grammars

SHARED = ("tokenizer", "embedder", "reranker", "model", "model.compiled", "pool", "engine")  # attributes of an `LLM`
_token_values = attrgetter(*(field.name for field in fields(Token)))


def resolve(kind: str, *parts: Any) -> Any:
    """Stands for what the reading side puts in its place."""
    raise AssertionError(kind, parts)


class RemoteValue:
    """A KV value in the engine's process, which keeps it until this object is gone."""

    def __init__(self, id: int, generation: int, home: "ServerCodec") -> None:
        # id, generation: which value, of which process
        self.id, self.generation, self._home = id, generation, home

    @property
    def lost(self) -> bool:
        """Whether its process has died, and the value with it."""
        return self._home.generation != self.generation

    def __del__(self) -> None:
        if not self.lost:
            self._home.release(self.id)


class Codec:
    """One side of a connection."""

    def __init__(self, llm: LLM, generation: int) -> None:
        self.generation = generation
        self.own: dict[str, Any] = {"llm": llm} | {name: attrgetter(name)(llm) for name in SHARED}
        self.names = {id(value): name for name, value in self.own.items() if value is not None}

    def dumps(self, message: object) -> bytes:
        """Raises what pickle raises for a message that cannot be sent."""
        data = io.BytesIO()
        _Pickler(data, self).dump(message)
        return data.getvalue()

    def loads(self, data: bytes) -> Any:
        return _Unpickler(io.BytesIO(data), self).load()

    def reduced(self, value: object) -> Any:
        """(kind, parts ...) of a value that does not go as it is; None for all others."""
        if (name := self.names.get(id(value))) is not None:
            return "own", name
        return None

    def resolved(self, kind: str, *parts: Any) -> Any:
        """What `reduced` of the other side has named."""
        if kind != "own":
            raise pickle.UnpicklingError(f"{kind} is not for this side")
        return self.own[parts[0]]


class ServerCodec(Codec):
    """The server's side: grammars leave as texts, and values are `RemoteValue`."""

    def __init__(self, llm: LLM, generation: int, release: Callable[[int], None]) -> None:
        super().__init__(llm, generation)
        self.release = release

    def reduced(self, value: object) -> Any:
        match value:
            case CompiledGrammar():
                return "grammar", value.grammar.text, value.grammar.json_after
            case ReasoningTokens():
                return "thought", next(name for name, form in FORMS.items() if form == value.form)
            case RemoteValue():
                return "value", value.id, value.generation
            case _:
                return super().reduced(value)

    def resolved(self, kind: str, *parts: Any) -> Any:
        return RemoteValue(parts[0], parts[1], self) if kind == "value" else super().resolved(kind, *parts)


class EngineCodec(Codec):
    """The engine's side: it compiles grammars, and keeps the values that the server holds."""

    def __init__(self, llm: LLM, generation: int) -> None:
        super().__init__(llm, generation)
        self._size = llm.config.vocab_size
        self._grammars = Grammars(llm.tokenizer, self._size)
        self._thoughts: dict[str, ReasoningTokens] = {}
        self._values: dict[int, KVCache] = {}
        self._numbers = count()

    def release(self, value: int) -> None:
        """Drop a value that the server held."""
        self._values.pop(value, None)

    def reduced(self, value: object) -> Any:
        if isinstance(value, KVCache):
            number = next(self._numbers)
            self._values[number] = value
            return "value", number, self.generation
        return super().reduced(value)

    def resolved(self, kind: str, *parts: Any) -> Any:
        match kind:
            case "grammar":
                return self._grammars.compile(Grammar(*parts))
            case "thought":
                if parts[0] not in self._thoughts:
                    made = ReasoningTokens(FORMS[parts[0]], self.own["tokenizer"], self._size)
                    self._thoughts[parts[0]] = made
                return self._thoughts[parts[0]]
            case "value":  # None: of a process before this one
                return self._values.get(parts[0]) if parts[1] == self.generation else None
            case _:
                return super().resolved(kind, *parts)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, codec: Codec) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._codec = codec

    def reducer_override(self, obj: Any) -> Any:
        """Called for all but numbers, texts and plain collections."""
        if type(obj) is Token:
            return Token, _token_values(obj)
        parts = self._codec.reduced(obj)
        return NotImplemented if parts is None else (resolve, parts)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, codec: Codec) -> None:
        super().__init__(file)
        self._codec = codec

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (__name__, "resolve"):
            return self._codec.resolved
        return super().find_class(module_name, global_name)

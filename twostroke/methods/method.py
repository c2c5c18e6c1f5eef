"""The base class of techniques (parameters, a citation, a program), and the table of those that are known."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from twostroke.engine.strokes import Program
from twostroke.errors import InvalidRequest
from twostroke.fields import Checked
from twostroke.kv.cache import KVCache
from twostroke.models.checkpoints.chat_passages import PassageTokens
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.models.checkpoints.tokenizer import Tokenizer

METHODS: "dict[str, type[Method]]" = {}  # by name: a class registers itself when its file is imported


class Prompt(list[int]):
    """A prompt's token ids, and facts about them that techniques use."""

    def __init__(self, tokens: Iterable[int], tokenizer: Tokenizer) -> None:
        """Tokens from `encode_chat` know the range of the last user's text."""
        super().__init__(tokens)
        self._asked, self._tokenizer = tokens, tokenizer

    def __reduce__(self) -> tuple[Any, ...]:
        return Prompt, (self._asked, self._tokenizer)

    @property
    def turn(self) -> range | None:
        """The range of the last user's text; None where the prompt is no chat."""
        return self._asked.turn if isinstance(self._asked, ChatTokens) else None

    @property
    def contents(self) -> Sequence[tuple[str, range]]:
        """(role, range) of each message's text; a prompt that is no chat is one text of the user's."""
        return self._asked.contents if isinstance(self._asked, ChatTokens) else [("user", range(len(self)))]

    @property
    def passages(self) -> Sequence[range]:
        """Passages that the caller has named (contexts of a server). Their ids are those of their texts alone."""
        return self._asked.passages if isinstance(self._asked, PassageTokens) else ()

    def alone(self, part: range) -> list[int]:
        """The ids of a named passage as a prompt of its own."""
        bos = self._tokenizer.bos_id if self._tokenizer.add_bos else None
        return [*([] if bos is None else [bos]), *self[part.start : part.stop]]

    def with_tokens(self, tokens: Iterable[int]) -> "Prompt":
        """Another prompt, of which nothing but the tokens is known."""
        return Prompt(tokens, self._tokenizer)

    def pieces(self, part: range) -> list[bytes]:
        """The bytes of each token of a part; a special token has none."""
        return [self._tokenizer.token_bytes(self[index]) for index in part]

    def encode(self, text: str) -> list[int]:
        """The ids of a text in the middle of a prompt."""
        return self._tokenizer.encode(text, add_bos=False) if text else []


def method_facts(result: object) -> dict[str, Any]:
    """The dataclass that a technique's program returned, as a dictionary of its counts; empty for anything else."""
    return dataclasses.asdict(result) if dataclasses.is_dataclass(result) and not isinstance(result, type) else {}


@dataclasses.dataclass(frozen=True)
class Method(Checked, ABC):
    """A technique. Subclasses are frozen dataclasses whose fields are its parameters, declared as in `fields.py`.

    `class Repeat(Method, name="repeat")` registers it: the engine, the CLI, the server and the shared tests know it by
    that name. A class without one is a base of others. Every field needs a default. Raises InvalidRequest if another
    technique has the name.

    Attributes:
        goes_on: whether its strokes go on after the first decode that follows its prefills.
    """

    name: ClassVar[str]
    goes_on: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        if name is not None:
            cls.name = name
            _register(name, cls)

    @property
    def checked_as(self) -> str:
        return f"{self.name}: "

    @property
    def techniques(self) -> tuple[str, ...]:
        """The names of the techniques that it runs, its own first."""
        return (self.name,)

    @property
    def companions(self) -> tuple[str, ...]:
        """The roles of the models that it takes besides the engine's own ("student", "draft")."""
        return ()

    @property
    def by_head(self) -> bool:
        """Whether heads keep different entries: models with windows or recurrent layers are then refused."""
        return False

    @property
    def biased(self) -> bool:
        """Whether it adds to scores of entries: backends that cannot are then refused."""
        return False

    @property
    def makes_entries(self) -> bool:
        """Whether it makes K and V of its own: models with latent attention are then refused."""
        return False

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> KVCache | None:
        """The part of an unfinished prefill from position 0 that the first decode will need; None: not known yet."""
        return None

    @abstractmethod
    def program(self, prompt: Prompt) -> Program:
        """The strokes for one prompt. It must be deterministic: a preempted request runs it again."""


def _register(name: str, technique: type[Method]) -> None:
    """Register a technique. Raises InvalidRequest if another one has the name."""
    if (known := METHODS.get(name)) is not None and _place(known) != _place(technique):
        raise InvalidRequest(f"the method name {name!r} is taken by {_place(known)}: choose another")
    METHODS[name] = technique


def _place(technique: type[Method]) -> str:
    return f"{technique.__module__}.{technique.__qualname__}"

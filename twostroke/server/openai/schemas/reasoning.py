"""What a body asks of the thoughts before an answer, in the words of several APIs."""

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, whole_number

Budget = Annotated[int | None, Field(ge=0), BeforeValidator(whole_number)]
UNUSED = "has no effect: the chat template does not use it"
SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn thoughts on and off


class ReasoningOptions(LenientModel):
    """`reasoning` of OpenAI's responses and of OpenRouter: an effort, or a budget in tokens."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"context", "generate_summary", "summary"})
    WITHOUT_EFFECT: ClassVar[Neutral] = {"exclude": (False,)}
    effort: str | None = None
    max_tokens: Budget = None
    enabled: bool | None = None


class ThinkingOptions(LenientModel):
    """`thinking` of Anthropic, DeepSeek and GLM: whether to think, and a budget in tokens."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"clear_thinking", "display"})
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Budget = None


class ReasoningFields(LenientModel):
    """The fields about thoughts."""

    reasoning_effort: str | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    thinking: ThinkingOptions | None = None
    # The most tokens of a thought; -1 for any number. It is closed then, and the answer goes on.
    thinking_budget: Annotated[int | None, Field(ge=-1), BeforeValidator(whole_number)] = None

    @property
    def effort(self) -> str | None:
        """How much to think, as the template's variable `reasoning_effort`."""
        return self.reasoning_effort or self.reasoning.effort

    @property
    def thinks(self) -> bool | None:
        """Whether to think before the answer; None leaves it to the model."""
        if self.thinking is not None:
            return None if self.thinking.type == "adaptive" else self.thinking.type == "enabled"
        if self.effort == "none" or self.reasoning.max_tokens == 0:
            return False
        return self.reasoning.enabled

    @property
    def thought_budget(self) -> int | None:
        """The most tokens of a thought, None for any number."""
        asked = [self.thinking_budget, self.reasoning.max_tokens, self.thinking and self.thinking.budget_tokens]
        return min((budget for budget in asked if budget is not None and budget >= 0), default=None)

    @property
    def switches(self) -> dict[str, Any]:
        """Variables that turn thoughts on or off: no template has all of them. An effort turns them on."""
        thinks = True if self.thinks is None and self.effort and self.thinking is None else self.thinks
        return {} if thinks is None else dict.fromkeys(SWITCHES, thinks)

    def without_levels(self, read: Collection[str]) -> Iterator[str]:
        """A sentence for an effort, where the template reads these variables and no effort. "none" has its effect."""
        name = "reasoning.effort" if self.reasoning_effort is None else "reasoning_effort"
        if self.effort != "none":
            switched = self.switches.keys() & set(read) and any(self.switches.values())
            yield f"{name} {'turns thoughts on and no more: the chat template has no levels' if switched else UNUSED}"

    def without_thoughts(self) -> Iterator[str]:
        """A sentence for what a model that writes no thoughts does not do."""
        told = "has no effect: this model's answers have no thoughts that are set apart"
        if self.thinks:
            yield f"{'reasoning' if self.thinking is None else 'thinking'} {told}"
        elif self.thought_budget is not None and self.thinks is None:
            yield f"{'thinking_budget' if self.thinking_budget is not None else 'reasoning'} {told}"

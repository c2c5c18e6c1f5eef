"""How model families mark a thought: a table of forms, and which of them a model uses.

Sources: the chat templates that are published with the models; for harmony, OpenAI's description of the format.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningForm:
    """The marks of a thought before an answer."""

    opener: str  # what a thought begins with. A template may have it at the end of the prompt.
    closer: str  # what it ends with
    before: str = ""  # what models write before the closer, where a thought is closed for them
    after: str = ""  # what models write between the closer and the answer
    lead: str = ""  # what an answer without a thought begins with. The answer is then a message of its own, in harmony.
    around: tuple[str, str] | None = None  # marks around the answer behind a thought, if the model writes any

    @property
    def messages(self) -> bool:
        """Whether a turn is made of several messages, each with a header that names its channel."""
        return bool(self.lead)


FORMS: dict[str, ReasoningForm] = {
    "think": ReasoningForm("<think>", "</think>", "\n", "\n\n"),  # Qwen, DeepSeek, SmolLM, OLMo, GLM
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "gemma": ReasoningForm("<|channel>thought\n", "<channel|>"),
    "granite-3.2": ReasoningForm("Here is my thought process:", "Here is my response:", "\n\n", "\n\n"),
    "granite-3.3": ReasoningForm("<think>", "</think>", after="<response>", around=("<response>", "</response>")),
    "harmony": ReasoningForm(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        after="<|start|>assistant<|channel|>final<|message|>",
        lead="<|channel|>final<|message|>",
    ),
}
PARSERS = ("auto", *FORMS, "none")
# What a template with a form has: one of its marks, as it stands there.
_SIGNS = {
    "granite-3.3": ("<response></response>",),
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]",),
    "gemma": ("<|channel>thought",),
    "granite-3.2": ("Here is my thought process:",),
    "harmony": ("<|channel|>analysis",),
}


def form_name(template: str | None) -> str | None:
    """The name of the form whose marks a chat template has; None if it has no marks of thoughts."""
    return next((name for name, signs in _SIGNS.items() if any(sign in (template or "") for sign in signs)), None)

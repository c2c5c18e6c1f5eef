"""Options that commands share: dataclasses whose fields are options, and a decorator that spreads them out."""

import inspect
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from twostroke.cli.config import ConfigOption, source_of
from twostroke.cli.parsers import exact_size, parse_id, parse_pairs, parse_path, parse_remote, parse_size
from twostroke.engine.options import OWN_DRAFTS, LLMOptions
from twostroke.errors import InvalidRequest
from twostroke.fields import MAX_INTEGER, Rule, rules
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.generation import FIELDS as DEFAULTS
from twostroke.sampling.params import SamplingParams

if TYPE_CHECKING:
    from twostroke.api.llm import LLM
    from twostroke.methods import Method


def option(rule: Rule, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """A command's option, described by a field's rule."""
    # That a count begins at 0 or 1 goes without saying.
    upper = (rule.most or MAX_INTEGER) < MAX_INTEGER or rule.above is not None
    text = f"{rule.help} {rule.bounds.capitalize()}." if upper and rule.bounds and rule.words is None else rule.help
    if rule.choices:
        settings = choice_settings(rule.choices) | settings
    elif rule.unit == "bytes":
        settings = {"parser": parse_size, "metavar": "SIZE"} | settings
    elif rule.unit == "directory":
        settings = {"parser": parse_path, "metavar": "DIR"} | settings
    if rule.unset:
        settings = {"show_default": rule.unset} | settings
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def choice_settings(choices: Collection[str]) -> dict[str, Any]:
    """Settings of an option that has choices: help and shell completion name them. They are checked with the rules."""
    return {"metavar": "|".join(choices), "autocompletion": _completer(choices)}


def _completer(words: Collection[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def checked(rule: Rule) -> Callable[[Any], Any]:
    """A callback for an option that no dataclass declares: raises BadParameter for a value that breaks the rule."""

    def check(value: Any) -> Any:
        if not rule.accepts(value):
            raise typer.BadParameter(f"{value} must be {rule.wanted_of(value).replace(', or None', '')}")
        return value

    return check


def _singular(name: str) -> str:
    """The name of an option of which each value is given by itself."""
    return name.removesuffix("s") if name.endswith(("ids", "words")) else name


def options_of(
    declaring: type,
    panel: str,
    leave_out: Container[str] = (),
    changes: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> Any:
    """A dataclass whose fields are options, one for each rule of a dataclass (`twostroke.fields`).

    Several values are an option that may be repeated, in the singular. `changes` are settings of single options;
    "names" among them is how an option is spelled, "default" what it is where nobody gives it.
    """
    made: list[tuple[str, Any, Any]] = []
    for name, rule in rules(declaring).items():
        if name in leave_out:
            continue
        kind, default = rule.kind, getattr(declaring, name, None)
        settings = dict(changes.get(name, {}))
        names, default = settings.pop("names", ()), settings.pop("default", default)
        if rule.unit == "bytes" and isinstance(default, int):
            default = exact_size(default)
        if kind in (tuple, dict):
            name = _singular(name) if kind is tuple else name
            kind = list[str] if rule.each is None or kind is dict else list[rule.each.kind]
            rule, default = replace(rule, help=f"{rule.help} May be repeated.", optional=True), None
        elif kind is bool and not names:
            flag = f"--{name.replace('_', '-')}"
            names = (f"{flag}/--no-{flag.removeprefix('--')}",) if default else (flag,)
        shown = kind | None if rule.optional or default is None else kind
        made.append((name, Annotated[shown, option(rule, *names, panel=panel, **settings)], field(default=default)))
    return make_dataclass(f"{declaring.__name__.removesuffix('Options')}Options", made, frozen=True)


@dataclass(frozen=True)
class ModelOptions(
    options_of(
        LLMOptions,
        "Model",
        leave_out=("max_running", "itl_ms"),
        changes={
            "model": {"names": ("--model", "-m"), "autocompletion": _completer(CATALOG)},
            "kv_remote": {"parser": parse_remote, "metavar": "URL"},
        },
    )
):
    """Options: which model, and how it is run."""

    def check_companions(self, method: "Method") -> None:
        """Raise InvalidRequest if the technique lacks a companion, and note unused ones. Call it before loading."""
        from twostroke.cli.report import note

        own = {role: role if self.draft == role else None for role in OWN_DRAFTS}
        there = {"student": self.student, "draft": None if any(own.values()) else self.draft, **own}
        for role, given in there.items():
            if role in method.companions and given is None:
                how = f"--draft {role}" if role in OWN_DRAFTS else f"--{role} int4, or MODEL"
                raise InvalidRequest(f"method {method.name} needs a {role}: give one with {how}")
            if role not in method.companions and given is not None:
                chooses = next((name for name, rule in rules(type(method)).items() if role in rule.choices), None)
                hint = f"; with --method-option {chooses}={role} it does" if chooses else ""
                option = f"draft {role}" if role in OWN_DRAFTS else role
                note(f"method {method.name} does not use --{option}{hint}")

    def validate(self, **changes: Any) -> None:
        """Raise InvalidRequest for options that cannot be, as far as this is possible without the model."""
        from twostroke.api.open_engine import llm_options

        llm_options(vars(LLMOptions()) | self._settings() | changes)

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in rules(LLMOptions)}

    def open(self, *, announced: bool = False, **changes: Any) -> "LLM":
        """Open the model; progress of downloads and loading is shown on stderr, its title only if not `announced`.

        Close it at the end: then what waits to be written to a tier is written.
        """
        from twostroke.api.llm import LLM
        from twostroke.cli.report import ProgressDisplay, note

        settings = self._settings() | changes
        name = settings.pop("model")
        with ProgressDisplay(f"loading {name}", announced=announced) as progress:
            llm = LLM(name, progress=progress, **settings)
        if llm.verified is not None:
            note(llm.verified.text)
        return llm


@dataclass(frozen=True)
class PositionalModelOptions(ModelOptions):
    """The same options for commands whose first argument may name the model, as in `twostroke serve MODEL`."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The model, in place of --model.",
            show_default=False,
            autocompletion=_completer(CATALOG),
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.model_argument is not None:
            if source_of("model") == "option":
                raise typer.BadParameter("name the model once: MODEL or --model", param_hint="MODEL / --model")
            object.__setattr__(self, "model", self.model_argument)


@dataclass(frozen=True)
class SamplingOptions(
    options_of(
        SamplingParams,
        "Sampling",
        leave_out=("n", "logprobs", "constraint", "reader"),
        changes={
            "seed": {"show_default": "drawn anew"},
            "logit_bias": {"metavar": "ID=BIAS"},
            "max_tokens": {"default": 1024},  # a small model may repeat itself for ever
        },
    )
):
    """How tokens are chosen, and when generation ends."""

    def fields(self) -> dict[str, Any]:
        """The options as fields of `SamplingParams`."""
        fields = asdict(self)
        for name, rule in rules(SamplingParams).items():
            if rule.kind is tuple and _singular(name) in fields:
                fields[name] = tuple(fields.pop(_singular(name)) or ())
        pairs = parse_pairs(self.logit_bias or (), "--logit-bias")
        fields["logit_bias"] = {parse_id(key): bias for key, bias in pairs.items()}
        return fields

    def params(self, **more: Any) -> SamplingParams:
        """Checked: raises InvalidRequest naming the field that is out of range."""
        return SamplingParams(**self.fields(), **more)


_OWN: dict[str, Any] = {"default": None, "show_default": "the model's own"}
_WHOLE: dict[str, Any] = {"default": None, "show_default": "until the model ends its answer"}


@dataclass(frozen=True)
class ChatSamplingOptions(
    options_of(
        SamplingParams,
        "Sampling",
        leave_out=set(rules(SamplingParams)) - {*DEFAULTS, "max_tokens"},
        changes={**dict.fromkeys(DEFAULTS, _OWN), "max_tokens": _WHOLE},
    ),
    SamplingOptions,
):
    """Sampling options that default to the model's own generation defaults."""

    def fields(self) -> dict[str, Any]:
        """The options as fields of `SamplingParams`, without those that are left to the model."""
        return {name: value for name, value in super().fields().items() if name not in DEFAULTS or value is not None}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for typer: each parameter that is a dataclass of options becomes one option per field."""
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = [], {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            own = get_type_hints(kind, include_extras=True)
            parameters += [(one.name, _default(one), own[one.name]) for one in fields(kind)]
        else:
            parameters.append((parameter.name, parameter.default, kind))
    parameters.append(("config", None, ConfigOption))

    @wraps(command)
    def run(**values: Any) -> None:
        del values["config"]  # read when it was parsed
        made = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**values, **made)

    del run.__wrapped__  # or typer would look through to the command's own parameters
    run.__annotations__ = {name: kind for name, _, kind in parameters}
    run.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, default, kind in parameters
        ]
    )
    return run


def _default(one: Field[Any]) -> Any:
    """The default of an option; `empty` if it is required."""
    return inspect.Parameter.empty if one.default is MISSING else one.default


JsonFlag = Annotated[bool, typer.Option("--json", help="The last line on stdout is one JSON object.")]

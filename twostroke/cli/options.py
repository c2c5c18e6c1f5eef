"""Options that commands share: dataclasses whose fields are options, and a decorator that spreads them out."""

import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from twostroke.checkpoints.catalog import DEFAULT_MODEL
from twostroke.errors import InvalidRequest

if TYPE_CHECKING:
    from twostroke.llm import LLM
    from twostroke.methods import Method
    from twostroke.sampling.params import SamplingParams

UNITS = {
    "": 1,
    **{f"{u}ib": 1 << 10 * i for i, u in enumerate("kmgt", 1)},
    **{f"{u}b": 10 ** (3 * i) for i, u in enumerate("kmgt", 1)},
}


def parse_size(text: str) -> int:
    """`2GiB`, `512MiB`, `1.5GB` or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size: write 2GiB, 512MiB or a number of bytes")
    return int(match[1]) * UNITS[match[2]] if match[1].isdigit() else int(float(match[1]) * UNITS[match[2]])


def parse_id(text: str) -> int:
    """A token id."""
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is no token id: write --logit-bias ID=BIAS")
    return int(text)


def parse_value(text: str) -> int | float | bool | str:
    """An int, a float, true or false; otherwise the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def parse_pair(text: str, option: str = "--method-option") -> tuple[str, Any]:
    """`key=value`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"{text!r} is not of the form key=value", param_hint=option)
    return key.strip().replace("-", "_"), parse_value(value.strip())


def _model(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Model", **settings)


def _sampling(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Sampling", **settings)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is run."""

    model: Annotated[
        str, _model("--model", "-m", help="A catalog name, a GGUF file, a Hugging Face directory, or a hub id.")
    ] = DEFAULT_MODEL
    threads: Annotated[int | None, _model(help="CPU threads.", show_default="one for each core")] = None
    dtype: Annotated[str, _model(help="Of activations and KV: float32, bfloat16 or auto.")] = "auto"
    weights: Annotated[
        str,
        _model(help="Matrices as stored, or re-encoded on load: bf16, int8, int4; int3 and int2 are kept in 4 bits."),
    ] = "stored"
    student: Annotated[
        str | None, _model(help="For techniques that hand over KV: int4, MODEL or MODEL@int4, of equal KV geometry.")
    ] = None
    draft: Annotated[str | None, _model(help="For speculation: a model of the same tokenizer, named likewise.")] = None
    device: Annotated[str, _model(help="Any torch device: cpu, cuda, cuda:1.")] = "cpu"
    backend: Annotated[
        str, _model(help="Kernels: native (or a variant of it, as native-avx512), reference (PyTorch), or auto.")
    ] = "auto"
    kv_bytes: Annotated[
        Any,
        _model(
            parser=parse_size,
            metavar="SIZE",
            help="Memory for KV pages: 2GiB, 512MiB, or bytes.",
            show_default="a quarter of what is free, 4 GiB at most",
        ),
    ] = None
    prefix_index: Annotated[str, _model(help="Share known prefixes: radix, hash or off.")] = "radix"
    max_step_tokens: Annotated[int, _model(min=1, help="Token budget of a step; longer prompts go in chunks.")] = 512
    page_size: Annotated[int, _model(min=1, help="KV entries per page.")] = 16

    def check_companions(self, method: "Method") -> None:
        """Before anything is loaded: raises InvalidRequest where the technique lacks one, and says which are idle."""
        from twostroke.cli.report import note

        for role in ("student", "draft"):
            if role in method.companions and getattr(self, role) is None:
                raise InvalidRequest(f"method {method.name} needs a {role}: give one with --{role} int4, or MODEL")
            if role not in method.companions and getattr(self, role) is not None:
                hint = f"; with --method-option draft={role} it does" if hasattr(method, "draft") else ""
                note(f"method {method.name} does not use --{role}{hint}")

    def open(self, **changes: Any) -> "LLM":
        """The model, with a display of downloads and loading on stderr."""
        from twostroke.cli.report import Loading
        from twostroke.llm import LLM

        settings = asdict(self) | changes
        name = settings.pop("model")
        with Loading(f"loading {name}") as progress:
            return LLM(name, progress=progress, **settings)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, and when generation ends."""

    max_tokens: Annotated[int, _sampling(help="Most tokens to generate.")] = 256
    temperature: Annotated[float, _sampling(help="0 takes the most likely token.")] = 0.0
    top_k: Annotated[int, _sampling(help="Keep the k most likely tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, _sampling(help="Keep the likeliest tokens up to this probability.")] = 1.0
    min_p: Annotated[float, _sampling(help="Keep tokens this likely relative to the likeliest.")] = 0.0
    repetition_penalty: Annotated[float, _sampling(help="Above 1 discourages tokens that occurred; 1 is off.")] = 1.0
    presence_penalty: Annotated[float, _sampling(help="Subtracted once for tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="Subtracted per occurrence in the output.")] = 0.0
    seed: Annotated[int | None, _sampling(help="Of the random stream.", show_default="drawn anew")] = None
    stop: Annotated[list[str] | None, _sampling(help="A string that ends the text; may be repeated.")] = None
    stop_token_id: Annotated[list[int] | None, _sampling(help="An id that ends the text; may be repeated.")] = None
    logit_bias: Annotated[
        list[str] | None, _sampling(metavar="ID=BIAS", help="Added to the logit of an id; may be repeated.")
    ] = None
    min_tokens: Annotated[int, _sampling(help="Before so many tokens nothing ends the text.")] = 0
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="End tokens do not end the text.")] = False

    def fields(self) -> dict[str, Any]:
        """As fields of `SamplingParams`."""
        fields = asdict(self) | {"stop": tuple(self.stop or ())}
        fields["stop_token_ids"] = tuple(fields.pop("stop_token_id") or ())
        pairs = [parse_pair(pair, "--logit-bias") for pair in self.logit_bias or ()]
        fields["logit_bias"] = {parse_id(key): bias for key, bias in pairs}
        return fields

    def params(self, **more: Any) -> "SamplingParams":
        """Checked: raises InvalidRequest naming the field that is out of range."""
        from twostroke.sampling.params import SamplingParams

        return SamplingParams(**self.fields(), **more)


@dataclass(frozen=True)
class MethodOptions:
    """Which technique answers."""

    method: Annotated[str, typer.Option(help="The technique: plain, repeat, ...", rich_help_panel="Method")] = "plain"
    method_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A parameter of it; may be repeated.", rich_help_panel="Method"),
    ] = None

    def build(self) -> "Method":
        """Raises BadParameter for what is not key=value, InvalidRequest for what the method does not know."""
        pairs = dict(parse_pair(pair) for pair in self.method_option or ())
        from twostroke.methods import method

        return method(self.method, **pairs)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """For typer: every parameter that is one of the dataclasses above becomes one option per field."""
    hints = get_type_hints(command, include_extras=True)
    parameters, groups = [], {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            own = get_type_hints(kind, include_extras=True)
            parameters += [(field.name, field.default, own[field.name]) for field in fields(kind)]
        else:
            parameters.append((parameter.name, parameter.default, kind))

    @wraps(command)
    def run(**values: Any) -> None:
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


JsonFlag = Annotated[bool, typer.Option("--json", help="The last line on stdout is one JSON object.")]

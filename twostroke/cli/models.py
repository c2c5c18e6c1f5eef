"""`twostroke models`: the catalog, fetching a model, and what a model is made of."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.report import ProgressDisplay, note, print_json, size

if TYPE_CHECKING:
    from twostroke.models.checkpoints.catalog import CatalogEntry
    from twostroke.models.checkpoints.checkpoint import Checkpoint
    from twostroke.models.checkpoints.tokenizer import Tokenizer
    from twostroke.models.config import ModelConfig

app = typer.Typer(help="List, fetch and inspect models.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A catalog name, a path, or a hub id.", metavar="MODEL")]


@app.command("list")
@spread
def list_models(*, as_json: JsonFlag = False) -> None:
    """The catalog: models that are fetched by name."""
    from twostroke.models.checkpoints.catalog import CATALOG

    entries = [catalog_facts(entry) for entry in CATALOG.values()]
    if as_json:
        print_json({"models": entries})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("name", "size", "licence", "fetched", "what it is"):
        table.add_column(name, overflow="fold", no_wrap=name in ("name", "size"))
    for entry in entries:
        fetched = "yes" if entry["fetched"] else "no"
        table.add_row(entry["name"], size(entry["size"]), entry["licence"], fetched, entry["description"])
    Console().print(table)


@app.command()
@spread
def pull(name: Name, *, as_json: JsonFlag = False) -> None:
    """Fetch a model, unless it is there already."""
    from twostroke.models.checkpoints.resolve import open_checkpoint

    with ProgressDisplay(f"fetching {name}") as progress:
        checkpoint = open_checkpoint(name, progress=progress)
    files, where = file_facts(checkpoint), origin(name)
    if as_json:
        total = sum(file["bytes"] for file in files)
        print_json({"name": checkpoint.name, "files": files, "bytes": total, "fetched_from": where})
        return
    if where is not None:
        note(f"fetched {where}" if where.startswith("from") else where)
    for file in files:
        typer.echo(f"{file['path']}  {size(file['bytes'])}")


@app.command()
@spread
def show(name: Name, *, as_json: JsonFlag = False) -> None:
    """What a model is made of, without loading its weights."""
    from twostroke.models.checkpoints.catalog import CATALOG
    from twostroke.models.checkpoints.fetch import is_fetched

    entry = CATALOG.get(name)
    facts: dict[str, Any] = {"catalog": None if entry is None else catalog_facts(entry)}
    if entry is None or is_fetched(entry):
        facts = checkpoint_facts(name) | facts
    elif not as_json:
        typer.echo(f"{name} is not fetched: `twostroke models pull {name}` gets it ({size(entry.size)}).")
    if as_json:
        print_json({"name": name, **facts})
        return
    print_facts(facts)


@app.command()
@spread
def check(name: Name, *, as_json: JsonFlag = False) -> None:
    """Check a model's weights: their values, and the digests of its files where they are known."""
    from twostroke.models.checkpoints.resolve import open_checkpoint
    from twostroke.models.checkpoints.verify import verify

    with ProgressDisplay(f"checking {name}") as progress:
        checkpoint = open_checkpoint(name, progress=progress)
        found = verify(checkpoint, progress)
    if as_json:
        facts = {"name": checkpoint.name, "tensors": found.tensors, "problems": list(found.problems)}
        compared = [{"file": str(path), "sha256": where} for path, where in found.compared]
        print_json(facts | {"compared": compared, "unknown": [str(path) for path in found.unknown]})
    else:
        for line in found.problems or (found.text,):
            typer.echo(line)
    if found.problems:
        raise typer.Exit(1)


def origin(name: str) -> str | None:
    """Where the file of a catalog model came from, in words, if it is known."""
    from twostroke.models.checkpoints.catalog import CATALOG
    from twostroke.models.checkpoints.fetch import fetched_from

    entry = CATALOG.get(name)
    return None if entry is None else fetched_from(entry)


def catalog_facts(entry: "CatalogEntry") -> dict[str, Any]:
    from twostroke.models.checkpoints.fetch import is_fetched, model_path

    return {
        "name": entry.name,
        "description": entry.description,
        "size": entry.size,
        "licence": entry.licence,
        "chat": entry.chat,
        "fetched": is_fetched(entry),
        "fetched_from": origin(entry.name),
        "path": str(model_path(entry)),
        "sha256": entry.sha256,
        "sources": {"packages": list(entry.packages), "hub": entry.hub and ":".join(entry.hub)},
    }


def checkpoint_facts(name: str) -> dict[str, Any]:
    """All facts of a checkpoint, without its weights."""
    from twostroke.models.checkpoints.resolve import open_checkpoint
    from twostroke.models.checkpoints.tokenizer import Tokenizer

    with ProgressDisplay(f"opening {name}") as progress:
        checkpoint = open_checkpoint(name, progress=progress)
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    return {
        "name": checkpoint.name,
        "licence": checkpoint.licence,
        **geometry_facts(checkpoint),
        "parameters": sum(tensor.num_elements for tensor in checkpoint.stored.values()),
        "weights": weight_facts(checkpoint),
        "weights_id": checkpoint.weights_id,
        "generation": dict(checkpoint.generation),
        "tokenizer": {"kind": tokenizer_kind(checkpoint), **tokenizer_facts(tokenizer)},
        "files": file_facts(checkpoint),
    }


def _rope(facts: Mapping[str, Any]) -> str:
    """A kind of layers' RoPE, in words."""
    if not facts["rotated"]:
        return "none"
    whole = facts["head_dim"]
    part = "" if facts["rotated"] == whole else f", {facts['rotated']} of {whole} numbers"
    return f"base {facts['base']:,.0f}{part}" + (", scaled" if facts["scaled"] else "")


def geometry_facts(checkpoint: "Checkpoint") -> dict[str, Any]:
    from twostroke.kv.geometry import Geometry
    from twostroke.models.kv_formats import CODED

    config = checkpoint.config
    ropes = Counter(
        (one.rope.base, one.rope.scaled, one.head_dim if one.rope.rotated is None else one.rope.rotated, one.head_dim)
        for one in config.attentions
    )
    shapes = Counter((one.num_heads, one.num_kv_heads, one.head_dim) for one in config.attentions)
    windows = Counter(config.windows)
    dtypes = "float32", "bfloat16", *CODED
    return {
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.layers[0].feed_forward.intermediate_size,
        "experts": _experts(config),
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_position,
        "windows": [{"window": window, "layers": count} for window, count in windows.items()],
        "ropes": [
            {"base": base, "scaled": scaled, "rotated": turns, "head_dim": whole, "layers": count}
            for (base, scaled, turns, whole), count in ropes.items()
        ],
        "head_shapes": [
            {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "layers": count}
            for (heads, kv_heads, dim), count in shapes.items()
        ],
        "tied_embeddings": config.tied,
        "recurrent_layers": list(config.state_layers),
        "state_bytes": Geometry.of(config, "bfloat16", "").state_bytes,
        "kv_bytes_per_token": {dtype: Geometry.of(config, dtype, "").entry_bytes for dtype in dtypes},
    }


def _experts(config: "ModelConfig") -> dict[str, int] | None:
    from twostroke.models.config import Experts

    mixtures = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]
    return {"count": mixtures[0].count, "chosen": mixtures[0].chosen, "layers": len(mixtures)} if mixtures else None


def weight_facts(checkpoint: "Checkpoint") -> dict[str, dict[str, int]]:
    """Tensors and stored bytes of each number format, the largest first."""
    from twostroke.models.formats.packed_tensor import PackedTensor

    formats: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.stored.values():
        kind = tensor.method if isinstance(tensor, PackedTensor) else tensor.format
        one = formats.setdefault(kind, {"tensors": 0, "bytes": 0})
        one["tensors"] += 1
        one["bytes"] += tensor.nbytes
    return dict(sorted(formats.items(), key=lambda item: -item[1]["bytes"]))


def tokenizer_kind(checkpoint: "Checkpoint") -> str:
    """The tokenizer's kind, as the checkpoint's files name it."""
    from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource

    source = checkpoint.tokenizer_source
    if isinstance(source, GgufTokenizerSource):
        return str(source.metadata["tokenizer.ggml.model"])
    return json.loads((source.directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["type"]


def tokenizer_facts(tokenizer: "Tokenizer") -> dict[str, Any]:
    eos = sorted(tokenizer.eos_ids)
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "adds_bos": tokenizer.add_bos,
        "eos_ids": eos,
        "eos_tokens": [tokenizer.token_text(id) for id in eos],
        "fingerprint": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template,
    }


def file_facts(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    return [{"path": str(path), "bytes": Path(path).stat().st_size} for path in checkpoint.files]


def print_facts(facts: dict[str, Any]) -> None:
    """Two columns: the name of a fact, and the fact."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(facts):
        table.add_row(name, Text(value))
    Console(highlight=False).print(table)


def rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The most important facts, in words."""
    catalog: dict[str, Any] = facts["catalog"] or {}
    if catalog:
        yield "catalog", f"{catalog['name']}: {catalog['description']}"
        yield "sources", ", ".join(catalog["sources"]["packages"])
        yield "hub", catalog["sources"]["hub"] or "not there"
        if catalog["fetched_from"]:
            yield "fetched", catalog["fetched_from"]
    if "architecture" not in facts:
        yield "licence", catalog["licence"]
        return
    yield "licence", facts["licence"] or catalog.get("licence") or "not stated"
    for name in ("architecture", "layers", "hidden_size", "intermediate_size"):
        yield name.replace("_", " "), str(facts[name])
    if experts := facts["experts"]:
        yield "experts", f"{experts['count']} in {experts['layers']} layers, {experts['chosen']} for a token"
    for name in ("heads", "kv_heads", "head_dim"):
        values = [str(one[name]) for one in facts["head_shapes"]]
        yield name.replace("_", " "), values[0] if len(set(values)) == 1 else _by_layers(values, facts["head_shapes"])
    yield "vocabulary", f"{facts['vocab_size']:,}" + (", embeddings tied" if facts["tied_embeddings"] else "")
    yield "context", f"{facts['context']:,}"
    windows = [(one["window"] and f"window {one['window']:,}") or "full" for one in facts["windows"]]
    yield "attention", _by_layers(windows, facts["windows"])
    if facts["recurrent_layers"]:
        state = size(facts["state_bytes"])
        yield "recurrent", f"{len(facts['recurrent_layers'])} of {facts['layers']} layers, {state} of state a sequence"
    yield "RoPE", _by_layers([_rope(one) for one in facts["ropes"]], facts["ropes"])
    yield "KV per token", ", ".join(f"{count:,} bytes in {name}" for name, count in facts["kv_bytes_per_token"].items())
    yield "parameters", f"{facts['parameters']:,}"
    for name, one in facts["weights"].items():
        yield f"weights in {name}", f"{size(one['bytes'])} in {one['tensors']} tensors"
    yield "weights id", facts["weights_id"]
    stated = ", ".join(f"{key} {value:g}" for key, value in facts["generation"].items())
    yield "generation", stated or "no defaults stated"
    tokenizer = facts["tokenizer"]
    yield "tokenizer", f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, id {tokenizer['fingerprint']}"
    yield "end tokens", ", ".join(map("{} ({})".format, tokenizer["eos_tokens"], tokenizer["eos_ids"])) or "none"
    template = tokenizer["chat_template"]
    yield "chat template", "none" if template is None else f"{len(template):,} characters"
    for file in facts["files"]:
        yield "file", f"{file['path']} ({size(file['bytes'])})"


def _by_layers(kinds: list[str], counts: list[dict[str, Any]]) -> str:
    if len(kinds) == 1:
        return kinds[0]
    return "; ".join(f"{kind} in {one['layers']} layers" for kind, one in zip(kinds, counts, strict=True))

"""`twostroke models`: the catalog, fetching a model, and what a model is made of."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from twostroke.cli.model_facts import catalog_facts, checkpoint_facts, file_facts, origin
from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.report import ProgressDisplay, note, print_json, size

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


def _rope(facts: Mapping[str, Any]) -> str:
    """A kind of layers' RoPE, in words."""
    if not facts["rotated"]:
        return "none"
    whole = facts["head_dim"]
    part = "" if facts["rotated"] == whole else f", {facts['rotated']} of {whole} numbers"
    return f"base {facts['base']:,.0f}{part}" + (", scaled" if facts["scaled"] else "")


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

"""Every number of an explanation is held to the tensors of the reference backend, recorded while its pass runs."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.methods.watching import needs_native, queried
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.reference.decoder import ReferenceLayer
from twostroke.backends.reference.operations import Operations
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.kv.attention import attention_weights
from twostroke.models.config import Experts
from twostroke.models.cost import SequenceRows
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.statistics import log_softmax
from twostroke.study.explain.attention_maps import CELLS
from twostroke.study.explain.explanation import ExplainOptions, Explanation, as_json, explain
from twostroke.study.explain.observation import settled_after
from twostroke.study.explain.prefill import LayerTensor, StoredKV, stored_kv
from twostroke.study.explain.terminal import print_explanation
from twostroke.system import strict_json

TinyLLM = Callable[..., LLM]
TEXT = "the quick brown fox jumps over the lazy dog"
FAMILIES = ["llama", "mistral", "qwen3moe", "gemma3", "qwen3_5", "lfm2", "granite4-hybrid"]


class Recorder:
    """What the reference computes, pass by pass: inputs and outputs of layers; q, k and v of each.

    Attributes:
        inputs, outputs: [rows, hidden]; queries, keys, values: [rows, heads, D]; each a list over layers in a list over
            passes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[dict[str, list[torch.Tensor]]] = []
        call, turned, gated = ReferenceLayer.__call__, Operations.turned, Operations.gated_linear

        def layer(of: ReferenceLayer, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if of.index == 0:
                self.passes.append({"inputs": [], "outputs": [], "q": [], "k": [], "v": [], "gated": []})
            made, read = call(of, x, *rest)
            self.passes[-1]["inputs"].append(x.clone())
            self.passes[-1]["outputs"].append(made.clone())
            return made, read

        def heads(of: Operations, *rest: Any) -> Any:
            made = turned(of, *rest)
            for name, tensor in zip("qkv", made, strict=True):
                assert tensor is not None
                self.passes[-1][name].append(tensor.clone())
            return made

        def product(of: Operations, *rest: Any) -> torch.Tensor:
            made = gated(of, *rest)
            self.passes[-1]["gated"].append(made)
            return made

        monkeypatch.setattr(ReferenceLayer, "__call__", layer)
        monkeypatch.setattr(Operations, "turned", heads)
        monkeypatch.setattr(Operations, "gated_linear", product)


def explained(llm: LLM, text: str = TEXT, aspects: ExplainOptions | None = None, **sampling: Any) -> Explanation:
    fields: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    return explain(llm, text, llm.tokenizer.encode(text), SamplingParams(**(fields | sampling)), aspects)


def weights_of(llm: LLM, q: torch.Tensor, k: torch.Tensor, layer: int) -> torch.Tensor:
    """Attention weights in float64: [Hq, rows, entries]; rows are the last entries."""
    attention = llm.config.layers[layer].attention
    keys = k.double().repeat_interleave(attention.num_heads // attention.num_kv_heads, 1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * attention.scale
    rows, entries = scores.shape[1:]
    own, at = torch.arange(entries - rows, entries)[:, None], torch.arange(entries)
    hidden = at > own
    if attention.window is not None:
        hidden |= at <= own - attention.window
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_a_tensor_of_the_reference(
    family: str, tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(family)
    explained(llm)  # what calibration takes is not recorded
    recorder = Recorder(monkeypatch)
    attending = list(llm.config.attention_layers)
    layer, head = attending[len(attending) // 2], 2
    at = attending.index(layer)
    made = explained(llm, aspects=ExplainOptions(layer, head, naive=0))
    config, n = llm.config, len(made.tokens)
    assert n <= CELLS, "one tile: the passes are the whole prompt, then single tokens"
    begin = next(i for i, one in enumerate(recorder.passes) if len(one["inputs"][0]) == n)
    prompt, *decodes = recorder.passes[begin : begin + 1 + len(made.decode)]
    decoder: Any = llm.model.compiled

    # Tokens and embedding: bits.
    ids = llm.tokenizer.encode(TEXT)
    assert [token.id for token in made.tokens] == ids
    assert [token.text for token in made.tokens] == [llm.tokenizer.token_text(id) for id in ids]
    assert made.embedding.shape == tuple(prompt["inputs"][0].shape)
    assert np.array_equal(made.embedding.values, prompt["inputs"][0][:, :6].numpy())

    # Shapes of the chosen layer.
    shapes = {shape.name: shape for shape in made.prefill.shapes}
    for name, tensor in (("Q", "q"), ("K", "k"), ("V", "v")):
        assert shapes[name].dims == tuple(prompt[tensor][at].shape)
    for name, tensor in (("hidden", "inputs"), ("hidden + MLP", "outputs")):
        assert shapes[name].dims == tuple(prompt[tensor][layer].shape)
    assert shapes["scores"].dims == (config.num_heads, n, n)
    check_gated(config.layers[layer].feed_forward, shapes, prompt["gated"], layer, n)

    # Attention: the maps, each head of the layer, and the numbers behind them.
    weights = [weights_of(llm, prompt["q"][i], prompt["k"][i], one) for i, one in enumerate(attending)]
    assert made.attention.starts == tuple(range(n))
    for i, found in enumerate(made.attention.layers):
        assert (found.layer, found.head) == (attending[i], None)
        check_map(found.weights, weights[i].mean(0))
    for i, found in enumerate(made.attention.heads):
        assert (found.layer, found.head) == (layer, i)
        check_map(found.weights, weights[at][i])
    assert made.attention.shown is made.attention.heads[head]
    assert made.prefill.pairs == int((weights[at][0] > 0).sum())
    arithmetic = made.attention.arithmetic
    assert arithmetic is not None
    scale = config.layers[layer].attention.scale
    assert np.array_equal(arithmetic.queries, (prompt["q"][at].float() * scale).numpy())
    assert np.array_equal(arithmetic.keys, prompt["k"][at].numpy())
    for i, (own, scores) in enumerate(zip(made.attention.heads, arithmetic.scores, strict=True)):
        kv_head = i // (config.num_heads // config.num_kv_heads)
        for row, some in enumerate(scores):
            products = arithmetic.keys[: row + 1, kv_head].astype(np.float64) @ arithmetic.queries[row, i]
            seen = np.isfinite(some)
            np.testing.assert_allclose(some[seen], products[seen], atol=1e-4, rtol=1e-5)
            powers = np.exp(some - some.max())
            np.testing.assert_allclose(powers / powers.sum(), own.weights[row], atol=1e-6)

    # What is stored, what it costs.
    stored = made.prefill.stored
    states = 0 if stored.states is None else stored.states.bytes
    assert (stored.entries, stored.bytes - states) == (n, sum(t.nbytes for t in (*prompt["k"], *prompt["v"])))
    assert stored.entry_bytes * n == stored.bytes - states
    groups = llm.pool.num_groups
    assert stored.pages == groups * math.ceil(n / stored.page_size)
    assert sum(kind.layers for kind in stored.kinds) == len(attending)
    check_states(llm, stored, n)
    work = llm.model.cost.work([SequenceRows(n, 0, 1)])
    assert made.prefill.work.flops == work.linear_flops + work.attention_flops + work.head_flops
    assert made.prefill.work.bytes == work.weight_bytes + work.kv_bytes
    assert made.prefill.work.intensity == made.prefill.work.flops / made.prefill.work.bytes

    # The first token and every step: candidates, the lens, attention, the cache.
    rows = [(prompt, None), *((one, i) for i, one in enumerate(decodes))]
    keys = [[prompt["k"][i]] for i in range(len(attending))]
    for states, number in rows:
        step = None if number is None else made.decode[number]
        if number is not None:
            for i in range(len(attending)):
                keys[i].append(states["k"][i])
        last = torch.stack([states["inputs"][0][-1], *(one[-1] for one in states["outputs"])])
        logits = torch.from_numpy(np.stack([decoder.logits(row[None])[0][0] for row in last])).double()
        chances = logits.softmax(-1)
        lens = made.lens if step is None else step.lens
        out = made.prefill.token if step is None else step.token_out
        assert len(lens) == config.num_layers + 1
        for i, found in enumerate(lens):
            assert found.layer == i
            assert [one.id for one in found.candidates] == chances[i].topk(5).indices.tolist()
            found_chances = [one.probability for one in found.candidates]
            np.testing.assert_allclose(found_chances, chances[i].topk(5).values, rtol=1e-4)
            assert found.probability == pytest.approx(float(chances[i][out.id]), rel=1e-4)
            assert found.rank == 1 + int((logits[i] > logits[i][out.id]).sum())
        assert out.id == int(chances[-1].argmax())
        assert out.probability == lens[-1].probability
        assert (made.prefill.candidates if step is None else step.candidates) == lens[-1].candidates
        own = torch.stack(
            [weights_of(llm, states["q"][i][-1:], torch.cat(keys[i]), one)[:, 0] for i, one in enumerate(attending)]
        ).mean((0, 1))
        for index, weight in made.prefill.attends if step is None else step.attends:
            assert weight == pytest.approx(float(own[index]), abs=1e-6)
        most = [weight for _, weight in (made.prefill.attends if step is None else step.attends)]
        np.testing.assert_allclose(most, own.topk(5).values, atol=1e-6)
    for number, step in enumerate(made.decode):
        assert (step.before.entries, step.after.entries) == (n + number, n + number + 1)
        assert step.after.bytes == (n + number + 1) * stored.bytes // n
        assert step.after.pages == groups * math.ceil((n + number + 1) / stored.page_size)
        previous = made.prefill.token if number == 0 else made.decode[number - 1].token_out
        assert (step.token_in.index, step.token_in.id) == (n + number, previous.id)
        assert step.work.kv_bytes == llm.model.cost.work([SequenceRows(1, n + number, 1)]).kv_bytes
    assert made.text == llm.tokenizer.decode([made.prefill.token.id, *(step.token_out.id for step in made.decode)])
    assert (made.finish_reason, made.timed_alike) == ("length", True)


def check_states(llm: LLM, stored: StoredKV, n: int) -> None:
    """Of a prompt in one page, whose rows and inputs are all there, and of one with a snapshot."""
    if stored.states is None:
        assert not llm.config.state_layers
        return
    layer = llm.config.state_layers[0]
    size = 4 * 3  # float32, three layers
    assert stored.states.row_bytes == size * layer.row_values
    assert stored.states.bytes == n * size * (layer.row_values + layer.conv_size)
    rows = bool(layer.row_values)
    assert (stored.states.layers, stored.states.rows, stored.states.snapshots) == (3, n * rows, 0)
    long = stored_kv(llm.prefill([5] * 100)).states
    assert long is not None
    assert (long.rows, long.snapshots, long.snapshot_bytes) == (36 * rows, 1, size * layer.snapshot_values)
    assert (long.heads, long.k_dim, long.v_dim) == (layer.num_v_heads, layer.k_dim, layer.v_dim)


def check_gated(mlp: Any, shapes: dict[str, LayerTensor], gated: list[torch.Tensor], layer: int, rows: int) -> None:
    if isinstance(mlp, Experts):
        assert shapes["gated"].dims == (rows, mlp.chosen, mlp.intermediate_size)
        assert shapes["router"].dims == (rows, mlp.count)
    elif len(gated) == 3 or layer == 0:
        assert shapes["gated"].dims == tuple(gated[layer].shape)


def check_map(found: tuple[np.ndarray, ...], expected: torch.Tensor) -> None:
    for i, row in enumerate(found):
        assert len(row) == i + 1
        np.testing.assert_allclose(row, expected[i, : i + 1], atol=1e-6)


def test_both_ways(tiny_llm: TinyLLM) -> None:
    """Counted by the engine, and equal to the formulas; the same tokens, also where they are drawn."""
    llm = tiny_llm()
    drawn: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    for sampling in ({}, drawn):
        made = explained(llm, max_tokens=7, aspects=ExplainOptions(naive=6), **sampling)
        found, p, g = made.both_ways, len(made.tokens), 6
        assert found is not None
        assert (found.prompt, found.steps) == (p, g)
        assert found.naive.computed == found.naive_formula == sum(p + i for i in range(g))
        assert found.cached.computed == found.cached_formula == p + g - 1
        assert found.ratio == found.naive.computed / found.cached.computed
        assert found.usual_ratio == pytest.approx((g * p + g**2 / 2) / (p + g))
        assert found.same_tokens
        assert found.naive.tokens == found.cached.tokens
        answer = (made.prefill.token.id, *(step.token_out.id for step in made.decode))
        assert found.cached.tokens == answer[:g]
        assert len(found.naive.seconds) == len(found.cached.seconds) == g
        assert found.largest_difference < 1e-4
    assert explained(llm, aspects=ExplainOptions(naive=0)).both_ways is None


@pytest.fixture
def native_llm(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    directory = write_model("gemma3", tmp_path_factory.mktemp("native"), head_dim=64)

    def open_native(**options: Any) -> LLM:
        chosen: dict[str, Any] = {"weights": "int8", "threads": 1, "kv_bytes": 16 << 20}
        return LLM(str(directory), **(chosen | options))

    return open_native


@needs_native
def test_native_agrees_with_the_reference(native_llm: TinyLLM) -> None:
    """The embedding bit by bit; weights and probabilities within 0.05, as bfloat16 K and int8 activations round."""
    mine, theirs = explained(native_llm(backend="native")), explained(native_llm(backend="reference"))
    assert np.array_equal(mine.embedding.values, theirs.embedding.values)
    for one, other in zip(mine.attention.layers, theirs.attention.layers, strict=True):
        for row, exact in zip(one.weights, other.weights, strict=True):
            np.testing.assert_allclose(row, exact, atol=0.05)
    for one, other in zip(mine.lens[:1], theirs.lens[:1], strict=True):
        assert one.candidates[0].id == other.candidates[0].id
        assert one.candidates[0].probability == pytest.approx(other.candidates[0].probability, abs=0.05)
    assert mine.prefill.shapes == theirs.prefill.shapes
    tail = native_llm(backend="native").prefill([token.id for token in mine.tokens]).tail
    assert tail is not None
    assert tail.logits is not None
    chances = np.exp(log_softmax(tail.logits.astype(np.float64)))
    expected = chances[[one.id for one in mine.prefill.candidates]]
    np.testing.assert_allclose([one.probability for one in mine.prefill.candidates], expected, rtol=1e-5)
    assert mine.both_ways is not None
    assert mine.both_ways.largest_difference == 0
    assert mine.both_ways.same_tokens
    assert mine.timed_alike


def test_a_long_prompt_takes_memory_for_a_tile(tmp_path: Path) -> None:
    """4,000 tokens: one head's matrix would take 64 MB in float32, those of a layer 256 MB."""
    directory = write_model("llama", tmp_path, max_position_embeddings=4200, num_hidden_layers=1)
    llm = LLM(str(directory), backend="reference", kv_bytes=32 << 20, threads=1)
    ids = [(i * 7919 + 3) % llm.config.vocab_size for i in range(4000)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    explain(llm, "warm", ids[:100], params, ExplainOptions(naive=0))
    tracemalloc.start()
    try:
        made = explain(llm, "long", ids, params, ExplainOptions(naive=0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    found = made.attention
    assert len(found.starts) <= CELLS
    assert found.arithmetic is None
    for one in (*found.layers, *found.heads):
        assert all(row.sum() == pytest.approx(1, abs=1e-4) for row in one.weights)


def test_cells_of_a_long_prompt_are_sums_of_its_weights(tiny_llm: TinyLLM) -> None:
    """Tiles, cells that join columns and cells that join rows: as from one pass over the whole matrix."""
    llm = tiny_llm("mistral")
    ids = [(i * 7919 + 3) % llm.config.vocab_size for i in range(150)]
    made = explain(llm, "", ids, SamplingParams(max_tokens=1), ExplainOptions(layer=2, naive=0)).attention
    whole = queried(llm, ids, len(ids))
    expected = list(attention_weights(whole.kv, whole.queries))[2]
    starts = list(made.starts)
    assert starts == list(range(0, 150, 3))
    joined = np.add.reduceat(np.add.reduceat(expected, starts, axis=-1), starts, axis=-2) / 3
    for head, found in enumerate(made.heads):
        for i, row in enumerate(found.weights):
            np.testing.assert_allclose(row, joined[head, i, : i + 1], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "state"), [("qwen3_5", "6 x 32 x 64"), ("lfm2", "288"), ("granite4-hybrid", "6 x 64 x 32")]
)
def test_the_terminal_says_what_recurrent_layers_keep(family: str, state: str, tiny_llm: TinyLLM) -> None:
    out = io.StringIO()
    made = explained(tiny_llm(family), text=" ".join([TEXT] * 10), aspects=ExplainOptions(naive=3))
    assert made.both_ways is not None
    assert made.both_ways.same_tokens
    print_explanation(Console(file=out, width=1000), made, everything=True)
    assert (
        f"The recurrent layers (3) attend to nothing. In place of K and V each has a state of {state} numbers"
        in out.getvalue()
    )
    assert "Over all attention layers and heads" in out.getvalue()


def test_as_json(tiny_llm: TinyLLM) -> None:
    made = explained(tiny_llm("mistral"), aspects=ExplainOptions(naive=2))
    text = strict_json.dumps(as_json(made))
    back = json.loads(text)
    values = np.array(back["embedding"]["values"]).astype(np.float32)
    assert np.array_equal(values, made.embedding.values), "every digit that a float32 needs"
    assert back["decode"][0]["token_in"]["id"] == made.decode[0].token_in.id
    assert set(back) == set(made.__dataclass_fields__)


def test_settled_after(tiny_llm: TinyLLM) -> None:
    layers = explained(tiny_llm()).lens
    ranks = [replace(layers[0], layer=i, rank=rank) for i, rank in enumerate((1, 3, 1, 1))]
    assert settled_after(ranks) == 2
    assert settled_after(ranks[:2]) is None
    assert settled_after(ranks[:1]) == 0


def test_errors(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    with pytest.raises(InvalidRequest, match="layer must be from 0 to 2"):
        explained(llm, aspects=ExplainOptions(layer=3))
    with pytest.raises(InvalidRequest, match="layer 3 is recurrent and attends to nothing"):
        explained(tiny_llm("qwen3_5"), aspects=ExplainOptions(layer=3))
    with pytest.raises(InvalidRequest, match="head must be from 0 to 3"):
        explained(llm, aspects=ExplainOptions(head=4))
    with pytest.raises(InvalidRequest, match="empty"):
        explain(llm, "", [], SamplingParams())
    with pytest.raises(ContextLengthExceeded):
        explain(llm, "", [1] * llm.max_model_len, SamplingParams())

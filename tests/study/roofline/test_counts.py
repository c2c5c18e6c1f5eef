"""Sizes against published totals and the engine's own counts; step times against their floors."""

import json
from collections.abc import Callable
from importlib.resources import files
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest, UnknownModel, UnsupportedArchitecture
from twostroke.kv.geometry import Geometry
from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import CostModel, SequenceRows
from twostroke.models.latent import Latent
from twostroke.models.rope import Rope
from twostroke.models.tensor_shapes import tensor_shapes
from twostroke.study.roofline.machines import MachineSpec, find_machine, machines
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.named_models import find_model, specifications
from twostroke.study.roofline.roofline import Roofline
from twostroke.study.roofline.weight_formats import FORMATS, weight_format
from twostroke.study.simulate.step_costs import RooflineCosts

LLAMA = specifications()["llama-3-70b"]


@pytest.mark.parametrize("model", specifications().values(), ids=lambda model: model.name)
def test_parameters_are_the_published_ones(model: ModelSpec) -> None:
    published = model.published
    assert published is not None
    # Published are rounded totals of these; all others are exact.
    rounded = {"gpt-3-175b": 1e8, "qwen3-next-80b-a3b": 1e9, "qwen3.5-0.8b": 1e8, "qwen3.5-4b": 1e7}
    rounded |= {"qwen3.5-9b": 1e9, "qwen3.5-27b": 1e8, "qwen3.5-35b-a3b": 1e8}
    rounded |= {"mixtral-8x22b": 1e9, "deepseek-v3": 1e9, "kimi-k2": 1e11, "glm-4.7-flash": 1e9}
    rounded |= {"gemma-4-12b": 1e8}  # with 46M of vision and audio
    assert abs(model.parameters - published) <= rounded.get(model.name, 0) / 2
    assert model.source


def test_llama_70b_by_hand() -> None:
    assert LLAMA.kv_bytes(1) == 80 * 2 * 8 * 128 * 2 == 327_680
    assert LLAMA.row_flops == 80 * 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    parts = LLAMA.prefill_flops(4096)
    assert parts["scores"] == 80 * 4 * 8192 * 4096 * 4097 // 2
    assert sum(parts.values()) == LLAMA.row_flops * 4096 + parts["scores"] + 2 * 8192 * 128256
    crossover = LLAMA.crossover()
    assert crossover == 2 * LLAMA.row_flops // (80 * 4 * 8192)  # pairs n (n + 1) / 2 against n rows: 104,447
    assert round(FORMATS["bf16"].total(LLAMA) / 1e9, 1) == 141.1


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token is multiplied with or looks up: chosen experts alone, and one embedding."""
    matrices = sum(count * matrix.used * matrix.inputs * matrix.outputs for count, matrix in model.matrices)
    return matrices + model.head.parameters + model.hidden + model.other_parameters


def test_windows_and_experts() -> None:
    oss = specifications()["gpt-oss-20b"]
    assert oss.kv_bytes(1000) == 2 * 8 * 64 * 2 * (12 * 1000 + 12 * 128)
    assert round(active_parameters(oss) / 1e9, 2) == 3.61
    assert specifications()["mistral-7b"].crossover() is None  # all layers have a window


def test_as_the_engine_counts(tiny_llm: Callable[..., LLM], family: str) -> None:
    """Parameters, FLOPs, expert reads and KV are those of the engine's own cost model."""
    llm = tiny_llm(family)
    cost, model = llm.model.cost, ModelSpec("tiny", llm.config)
    assert model.parameters == sum(prod(shape) for shape in tensor_shapes(llm.config).values())
    for step in ([SequenceRows(5, 3, 1)], [SequenceRows(1, 40, 1), SequenceRows(17, 9, 2)], [SequenceRows(60)]):
        work = cost.work(step)
        count = sum(one.count for one in step)
        assert model.row_flops * count == work.linear_flops
        attention = sum(model.attention_flops(one) for one in step)
        # Ours multiplies the whole latent entry; a plan takes the least that any engine needs.
        assert attention < work.attention_flops if llm.config.latent else attention == work.attention_flops
        assert model.head.row_flops * sum(one.logits for one in step) == work.head_flops
    assert 2 * model.kv_bytes(1) == llm.pool.entry_bytes  # the reference keeps float32
    assert model.snapshot_bytes == llm.pool.geometry.state_bytes


def test_recurrent_layers_by_hand() -> None:
    """Qwen3.5 27B: 48 of 64 layers have a state of 48 x 128 x 128, and a convolution over 10,240 inputs."""
    model = specifications()["qwen3.5-27b"]
    state, conv = 48 * 128 * 128, 2 * 16 * 128 + 48 * 128
    assert model.kv_bytes(1000) == 16 * 2 * 4 * 256 * 2 * 1000
    assert model.snapshot_bytes == 48 * 4 * (state + 3 * conv)
    row = 16 * 128 + 48 * 128 + 2 * 48  # k, u and the sums of decays, which are float32
    assert model.state_bytes(63) == 48 * 2 * (63 * row + 4 * conv)
    assert model.state_bytes(100) == 48 * 2 * (64 * row + 4 * conv) + model.snapshot_bytes
    assert model.state_bytes(128) == model.state_bytes(100) + model.snapshot_bytes == model.state_bytes(10_000)
    # A token behind 130: the third of its chunk. It meets the state three times and three rows twice.
    flops = 6 * state + 2 * 4 * conv + 3 * 4 * (16 * 128 + 48 * 128)
    read = 2 * (3 * row + 4 * conv) + 4 * (state + 3 * conv) * (1 + 1 / 64)
    recurrent = next(kind for kind in model.layers if kind.state)
    assert recurrent.mixing(SequenceRows(1, 130), model.stored) == (flops, pytest.approx(read))
    gated = 5120 * 2 * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * 2 * 5120
    linear = 5120 * 2 * (conv + 48 * 128 + 2 * 48) + 48 * 128 * 2 * 5120
    assert model.row_flops == 16 * gated + 48 * linear + 64 * 2 * 3 * 5120 * 17408


@given(count=st.integers(1, 300), cut=st.integers(1, 299), context=st.integers(0, 200))
def test_recurrent_layers_compute_the_same_in_any_chunks(count: int, cut: int, context: int) -> None:
    model, cut = specifications()["qwen3.5-4b"], min(cut, count)
    parts = [SequenceRows(cut, context), SequenceRows(count - cut, context + cut)]
    assert model.attention_flops(SequenceRows(count, context)) == sum(map(model.attention_flops, parts))


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 100, 128, 150, 192])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite4-hybrid"])
def test_a_value_of_states_has_the_bytes_that_are_counted(
    family: str, tiny_llm: Callable[..., LLM], length: int
) -> None:
    """With pages of one entry, whose rounding hides nothing."""
    llm = tiny_llm(family, dtype="bfloat16", page_size=1)
    model = ModelSpec("tiny", llm.config)
    assert llm.prefill([5 + i for i in range(length)]).nbytes == model.moved_bytes(length)
    assert model.moved_bytes(length) <= model.kv_bytes(length) + model.state_bytes(length)


@given(count=st.integers(1, 5000), context=st.integers(0, 5000), tp=st.sampled_from([1, 2, 4, 8]))
def test_no_step_is_below_its_floor(count: int, context: int, tp: int) -> None:
    machine = find_machine("h100")
    step = Roofline(LLAMA, machine, FORMATS["bf16"], tp).step([SequenceRows(count, context, 1)])
    assert step.seconds >= step.flops / machine.flops["bf16"]
    assert step.seconds >= step.bytes / machine.bandwidth
    assert (step.link_s > 0) == (tp > 1)


def test_an_all_reduce_by_hand() -> None:
    assert Roofline(LLAMA, find_machine("a100"), FORMATS["bf16"], 8).all_reduce_bytes(4096) == 117_440_512


def test_bad_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"did you mean .*llama-3-70b"):
        find_model("lama-3-70b")
    with pytest.raises(InvalidRequest, match="did you mean h100"):
        find_machine("h10")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UnsupportedArchitecture, match="a plan needs a decoder"):
        find_model(str(tmp_path))
    machine = tmp_path / "mine.toml"
    machine.write_text("memory_gb = 1\ntflops = {bf16 = 1}\ncompute = 0.5\nmemory = 0.5\n")
    with pytest.raises(InvalidRequest, match="has no bandwidth_tbs"):
        find_machine(str(machine))


# Of which no latency between devices was found.
UNLINKED = {"m4-max", "graviton-4"}


@pytest.mark.parametrize("machine", machines().values(), ids=lambda machine: machine.name)
def test_every_machine_has_a_source_and_what_links_cost(machine: MachineSpec) -> None:
    """A latency and a rate between devices, or no plan of tensor parallelism; a few bytes take the latency alone."""
    assert machine.source
    assert machine.bandwidth > 0
    assert bool(machine.unknown_link) == (machine.name in UNLINKED)
    if machine.unknown_link:
        with pytest.raises(InvalidRequest, match=f"{machine.name} has no {machine.unknown_link}"):
            Roofline(LLAMA, machine, FORMATS["bf16"], 2)
        return
    assert machine.link_latency is not None
    assert 1e-6 < machine.link_latency < 1e-4
    assert machine.link is not None
    assert machine.link * machine.link_share < machine.bandwidth
    step = Roofline(LLAMA, machine, FORMATS["bf16"], 8).step([SequenceRows(1, 100, 1)])
    assert step.link_s == pytest.approx(160 * machine.link_latency, rel=0.25)


def test_the_file_says_where_each_latency_is_from() -> None:
    """By kind of link, in the comment above: NVLink, PCIe, xGMI, sockets."""
    text = files("twostroke.study.roofline").joinpath("data/machines.toml").read_text()
    kinds = {"NVLink": "aiconfigurator", "PCIe": "nccl/issues/1530", "xGMI": "vllm/pull/19744", "x86": "DeepSpeed/pull"}
    comment = text[text.index("# `link_us`") : text.index("# No figure was found")]
    lines = comment.split("\n# - ")[1:]
    assert [next(kind for kind in kinds if kind in line) for line in lines] == list(kinds)
    assert all(source in line for source, line in zip(kinds.values(), lines, strict=True))
    assert all(name in text[text.index("# No figure was found") :] for name in ("Graviton 4", "M4 Max"))


def test_a_config_is_enough(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """The sizes from a config.json alone are those of the whole directory."""
    for family in ("qwen3moe", "gemma3"):
        directory = tmp_path / family
        directory.mkdir()
        (directory / "config.json").write_text((tiny_directory(family) / "config.json").read_text())
        alone, whole = find_model(str(directory)).model, find_model(str(tiny_directory(family))).model
        assert (alone.layers, alone.parameters) == (whole.layers, whole.parameters)


def test_layers_of_two_sizes_of_heads() -> None:
    """Gemma 4 12B: 40 layers keep 1,024 entries of 8 heads; 8 have one head of 512 numbers, which each device holds."""
    model = specifications()["gemma-4-12b"]
    window, whole = 40 * 2 * 8 * 256 * 2, 8 * 2 * 512 * 2
    assert model.kv_bytes(5000) == 1024 * window + 5000 * whole
    assert (
        Roofline(model, find_machine("h100"), FORMATS["bf16"], 8).held_bytes(5000) == 1024 * window + 8 * 5000 * whole
    )
    mlp = 3 * 3840 * 15360
    own = {None: 3840 * (2 * 16 * 512 + 512), 1024: 3840 * (2 * 16 * 256 + 2 * 8 * 256)}
    assert model.row_flops == 2 * (8 * own[None] + 40 * own[1024] + 48 * mlp)


def test_a_head_of_multi_token_prediction() -> None:
    """One layer with attention, behind a projection of two hidden states; embedding and head are the model's."""
    model = specifications()["qwen3.5-27b"]
    head, attention = model.guessing, 5120 * (3 * 24 * 256 + 2 * 4 * 256)
    assert head.row_flops == 2 * (2 * 5120 * 5120 + attention + 3 * 5120 * 17408)
    assert head.parameters == head.row_flops // 2 + 10752 + head.hidden
    assert FORMATS["bf16"].total(head) == 2 * head.parameters
    assert head.kv_bytes(1) == 2 * 4 * 256 * 2
    with pytest.raises(InvalidRequest, match="leave out --draft mtp"):
        _ = LLAMA.guessing
    assert {name for name, one in specifications().items() if one.guesser} == {
        *(f"qwen3.5-{size}" for size in ("0.8b", "4b", "9b", "27b", "35b-a3b")),
        *("qwen3-next-80b-a3b", "deepseek-v3", "glm-4.7-flash"),
    }


def test_the_engine_counts_latent_attention_as_the_plan_does() -> None:
    """GLM-4.7-Flash, as the engine describes it: bytes of an entry, and FLOPs of a row."""
    latent = Latent(rank=512, rotated=64, plain=192, value=256, query_rank=768)
    attention = Attention(20, 1, latent.entry, 1.0, Rope(1e6), latent=latent)
    experts = Experts(64, 4, 1536, shared_size=1536, shared_gated=False, sigmoid=True, selection_bias=True)
    layers = (Layer(attention, GatedMLP(10240)), *[Layer(attention, experts)] * 46)
    config = ModelConfig("glm4_moe_lite", 154880, 2048, 202752, 1e-5, layers)
    planned = specifications()["glm-4.7-flash"]
    described = ModelSpec("glm", config)
    assert Geometry.of(config, "bfloat16", "tokenizer").entry_bytes == planned.kv_bytes(1) == 47 * 576 * 2
    assert described.kv_bytes(1) == planned.kv_bytes(1)
    assert described.row_flops == planned.row_flops == CostModel(config, {}, 1).row_flops
    assert Geometry.of(planned.config, "bfloat16", "tokenizer").entry_bytes == planned.kv_bytes(1)


def test_latent_attention_keeps_one_vector_an_entry() -> None:
    """DeepSeek-V3: 576 numbers in each of 61 layers, and 37 B parameters of a token."""
    model = specifications()["deepseek-v3"]
    assert model.kv_bytes(1) == 61 * 576 * 2
    assert model.with_kv_bits(8).kv_bytes(1) == 61 * (576 + 4)
    assert active_parameters(model) == pytest.approx(37e9, rel=0.02)
    # Decoding, scores are made from entries; a prefill makes keys and values.
    assert model.attention_flops(SequenceRows(1, 999)) == 61 * 128 * 2 * (2 * 512 + 64) * 1000
    assert model.attention_flops(SequenceRows(1000, 0)) == 61 * 128 * 2 * (128 + 64 + 128) * 500_500
    roofline = Roofline(model, find_machine("h200"), weight_format("fp8-w8a8"), 8)
    for rows in ([SequenceRows(1, 999)] * 4, [SequenceRows(512, 1024), SequenceRows(1, 70)]):
        assert RooflineCosts(roofline).step(rows).seconds == pytest.approx(roofline.step(rows).seconds)

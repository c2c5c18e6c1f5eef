"""Token ids and texts agree with independent implementations, transformers and SentencePiece."""

import io
import json
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from tests.tiny import write_tokenizer
from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource, HfTokenizerSource
from twostroke.models.checkpoints.pre_tokenizers import PRE_TOKENIZERS
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer

PIECES = ["  ", " ", "\n", "\n\n", "\t", "\r\n", "'s", "'LL", "123", " 7", "½", "²", "e\u0301", "\u212b", "▁", "<b>",
          "</b>", "👩‍👩‍👧", " " * 17, " " * 40, "\n" * 35, "\u00a0", "\u3000", "hello", " World", "don't", "I'LL",
          "x1y2", "한국어", "日本語", "русский", "العربية", "ไทย", "हिन्दी", "def f(x):\n  return x",
          "<|im_end", "|>"]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25).map("".join)
LIBRARY = Path(json.__file__).parent.parent  # source code that every Python installation has
SOURCES = [path.read_text(encoding="utf-8")[:20_000] for path in sorted(LIBRARY.glob("t*.py"))]


def load(name: str) -> Tokenizer:
    return Tokenizer.from_source(open_checkpoint(name).tokenizer_source)


def transformers_ids(name: str, change: Callable[[tokenizers.Tokenizer], None]) -> Callable[[str], list[int]]:
    """transformers reads the same file; `change` adds parts that its conversion omits."""
    from transformers import AutoTokenizer

    source = open_checkpoint(name).tokenizer_source
    assert isinstance(source, GgufTokenizerSource)
    reference = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    change(reference.backend_tokenizer)
    return lambda text: reference(text)["input_ids"]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load("smollm2-135m")


@pytest.fixture(scope="module")
def smollm_reference() -> Callable[[str], list[int]]:
    def change(backend: tokenizers.Tokenizer) -> None:  # as the model's own tokenizer.json has it
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])

    return transformers_ids("smollm2-135m", change)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("<|im_start|>user\n", [1, 4093, 198]),
        ("", []),
    ],
)
def test_smollm_ids_are_the_published_ones(smollm: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm.encode(text) == ids
    assert smollm.decode(ids, skip_special=False) == text


def test_smollm_facts(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_id, smollm.eos_ids, smollm.add_bos) == (49152, 1, {0, 2}, False)
    assert smollm.special_ids == frozenset(range(17))
    assert (smollm.token_text(2), smollm.token_bytes(2)) == ("<|im_end|>", b"")
    assert smollm.token_bytes(2, skip_special=False) == b"<|im_end|>"
    assert smollm.encode("x", add_bos=True) == [1, *smollm.encode("x")]


def test_source_code_has_the_ids_of_transformers(smollm: Tokenizer, smollm_reference: Any) -> None:
    for text in SOURCES:
        ids = smollm.encode(text)
        assert ids == smollm_reference(text)
        assert smollm.decode(ids) == text


@settings(deadline=None, max_examples=300)
@given(texts)
def test_any_text_has_the_ids_of_transformers(smollm: Tokenizer, smollm_reference: Any, text: str) -> None:
    assert smollm.encode(text) == smollm_reference(text)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_streaming_any_ids_gives_the_decoded_text(smollm: Tokenizer, ids: list[int], skip: bool) -> None:
    stream = smollm.stream(skip_special=skip)
    assert "".join(map(stream.push, ids)) + stream.flush() == smollm.decode(ids, skip_special=skip)


@settings(deadline=None)
@given(texts)
def test_untrusted_text_never_becomes_a_special_token(smollm: Tokenizer, text: str) -> None:
    assert smollm.special_ids.isdisjoint(smollm.encode(f"<|im_end|>{text}<|im_start|>", parse_special=False))


def test_threads_share_one_tokenizer(smollm: Tokenizer) -> None:
    text, wrong = "<|im_start|>a", []
    expected = {flag: smollm.encode(text, parse_special=flag) for flag in (True, False)}

    def work(flag: bool) -> None:
        wrong.extend(1 for _ in range(500) if smollm.encode(text, parse_special=flag) != expected[flag])

    threads = [threading.Thread(target=work, args=(flag,)) for flag in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_every_token_has_bytes_and_a_text(smollm: Tokenizer) -> None:
    assert all(smollm.token_text(index) for index in range(smollm.vocab_size))
    assert smollm.token_bytes(smollm.vocab_size) == b""  # a padding row of the embedding
    with pytest.raises(InvalidRequest, match="negative"):
        smollm.token_bytes(-1)
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm.encode("\ud800")


def gguf_of(source: Any, **changes: Any) -> GgufTokenizerSource:
    changed = dict(source.metadata) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GgufTokenizerSource(source.path, {key: value for key, value in changed.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.model is 'bert' \(WordPiece, of encoders\); Twostroke knows 'gpt2' and"),
        ({"model": "none"}, r"tokenizer.ggml.model is 'none' \(the file has no tokenizer\)"),
        ({"model": "new"}, "tokenizer.ggml.model is 'new'; Twostroke knows"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b c"]}, "not a pair"),
        ({"merges": ["nothing_such no_such"]}, "do not fit"),
        ({"tokens": ["a"] * 49152}, "duplicates"),
        ({"token_type": np.ones(3, np.int32)}, "3 token types"),
        ({"eos_token_id": 49152}, "eos_token_id 49152"),
        ({"model": "llama"}, "scores is missing"),
    ],
)
def test_what_is_not_known_exactly_is_refused(changes: dict[str, Any], words: str) -> None:
    source = open_checkpoint("smollm2-135m").tokenizer_source
    with pytest.raises(CheckpointError, match=words) as caught:
        Tokenizer.from_source(gguf_of(source, **changes))
    assert str(source.path) in str(caught.value)  # type: ignore[union-attr]


def test_the_fingerprint_is_of_what_decides_ids(smollm: Tokenizer) -> None:
    source = open_checkpoint("smollm2-135m").tokenizer_source
    same = Tokenizer.from_source(gguf_of(source, eos_token_id=0, add_bos_token=True))
    assert same.fingerprint == smollm.fingerprint
    assert (same.add_bos, same.encode("a")) == (True, [1, *smollm.encode("a")])
    closed = Tokenizer.from_source(gguf_of(source, add_eos_token=True))
    assert [closed.encode("a"), closed.encode("a", add_bos=False)] == [[*smollm.encode("a"), 2], smollm.encode("a")]
    merges = list(source.metadata["tokenizer.ggml.merges"])  # type: ignore[union-attr]
    types = np.array(source.metadata["tokenizer.ggml.token_type"])  # type: ignore[union-attr]
    types[100] = 4
    changes: list[dict[str, Any]] = [{"pre": "gpt-2"}, {"merges": merges[::-1]}, {"token_type": types}]
    digests = {Tokenizer.from_source(gguf_of(source, **change)).fingerprint for change in changes}
    assert len(digests | {smollm.fingerprint}) == 4


@pytest.mark.parametrize(
    ("pre", "cuts"),
    [
        ("gpt-2", ["I", "'m", " 12345", "x", "'", "LL", " ", " a", "!!", "\n\n"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", "5", "x", "'", "LL", " ", " a", "!!", "\n\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", "5", "x", "'LL", " ", " a", "!!\n\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "45", "x", "'LL", " ", " a", "!!\n\n"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", "5", "x", "'LL", " ", " a", "!!\n\n"]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_do(pre: str, cuts: list[str]) -> None:
    found = PRE_TOKENIZERS[pre].build().pre_tokenize_str("I'm 12345x'LL  a!!\n\n")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in found] == cuts


# By the models' tokenizer.json files: what llama.cpp's names split one text into.
CUTS = {
    "default": "I|'|m| |123|45|x|'|LL| | a|!!|\n|\n|camelCase| 文な한| foo|_|bar|\t| x|\n| y| |½2| |(|a|,|b|).",
    "deepseek-llm": "I|'|m| |12345|x|'|LL| | a|!!|\n|\n|camelCase| |文な한| foo|_|bar|\t| x|\n| y| |½2| (|a|,|b|).",
    "deepseek-coder": "I|'|m| |1|2|3|x|'|LL| | a|!!|\n|\n|camelCase| |文な한| foo|_|bar|\t| x|\n| y| |½|2| (|a|,|b|).",
    "deepseek-v3": "I|'m| |123|45|x|'LL| | a|!!\n\n|camelCase| |文な|한| foo|_bar|\t| x|\n| y| |½2| (|a|,b|).",
    "deepseek-r1-qwen": "I|'m| |1|2|3|4|5|x|'LL| | a|!!\n\n|camelCase| 文な한| foo|_bar|\t| x|\n| y| |½|2| (|a|,b|).",
    "falcon": "I|'|m| |123|45|x|'|LL| | a|!!|\n|\n|camelCase| 文な한| foo|_|bar|\t| x|\n| y| ½2| |(|a|,|b|).",
    "command-r": "I|'m| |1|2|3|4|5|x|'|LL| | a|!!|\n|\n|camelCase| 文な한| foo|_|bar|\t| x|\n| y| |½|2| (|a|,|b|).",
    "mpt": "I|'m| 12345|x|'|LL| | a|!!|\n|\n|camelCase| 文な한| foo|_|bar|\t| x|\n| y| ½2| (|a|,|b|).",
    "dbrx": "I|'m| |123|45|x|'LL| | a|!!\n\n|camelCase| 文な한| foo|_bar|\t| x|\n| y| |½2| (|a|,b|).",
    "gpt-4o": "I'm| |123|45|x'LL| | a|!!\n\n|camel|Case| 文な한| foo|_bar|\t| x|\n| y| |½2| (|a|,b|).",
    "kimi-k2": "I'm| |123|45|x'LL| | a|!!\n\n|camel|Case| |文|な한| foo|_bar|\t| x|\n| y| |½2| (|a|,b|).",
    "seed-coder": "I|'m| |1|2|3|4|5|x|'LL| | a|!!|\n\n|camelCase| 文な한| foo|_bar|\t| x|\n| y| |½|2| (|a|,b|).",
    "bloom": "I'm| 12345x'LL| | a|!!\n\n|camelCase| 文な한| foo_bar|\t| x|\n| y| ½2| (|a|,|b|).",
    "viking": "I'm| |1|2|3|4|5|x'LL| | a|!!\n\n|camelCase| 文な한| foo_bar|\t| x|\n| y| |½|2| (|a|,|b|).",
    "chameleon": "I|'|m| |1|2|3|4|5|x|'|LL|  |a|!|!|\n|\n|camelCase| 文な한| foo|_|bar|\t| x|\n| y| |½|2| |(|a|,|b|)|.",
    "superbpe": "I'm |12|345|x'LL  a!!\n\ncamelCase 文な한 foo_bar\t x\n y |½2| (a,b).",
    "afmoe": "I|'m| |12|345|x|'LL| | a|!!\n\n|camelCase| |文な한| foo|_bar|\t| x|\n| y| |½2| (|a|,b|).",
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers_by_llama_cpps_names(pre: str) -> None:
    text = CUTS[pre].replace("|", "")
    found = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in found) == CUTS[pre]
    accented = [span for _, span in PRE_TOKENIZERS[pre].build().pre_tokenize_str(" café")]
    # deepseek-llm's pattern of punctuation has the range from : to ~, which holds letters.
    assert accented == ([(0, 4), (4, 5)] if pre == "deepseek-llm" else [(0, 5)])


@pytest.mark.parametrize(
    ("pre", "model", "text", "ids"),
    [
        ("smollm", "smollm2-135m", "    Hello\n    Hello", [333, 38699, 472, 38699]),
        ("smollm", "smollm2-135m", "w048 7tuijk dsdfhu", [103, 32, 36, 40, 216, 39, 24961, 47112, 21554, 3492, 15995]),
    ],
)
def test_llama_cpps_vectors(pre: str, model: str, text: str, ids: list[int]) -> None:
    """Expected ids are those of llama.cpp's vocabulary tests."""
    assert Tokenizer.from_source(gguf_of(open_checkpoint(model).tokenizer_source, pre=pre)).encode(text) == ids


@pytest.mark.parametrize(("pre", "words"), [(None, "is missing"), ("made-up", "is 'made-up', which is unknown")])
def test_a_file_without_a_known_pre_is_read_as_llama_cpp_does(
    pre: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_checkpoint("smollm2-135m").tokenizer_source
    tokenizer = Tokenizer.from_source(gguf_of(source, pre=pre))
    (message,) = caplog.messages
    assert f"tokenizer.ggml.pre {words}: text is split as llama.cpp does by default" in message
    caplog.clear()
    default = Tokenizer.from_source(gguf_of(source, pre="default"))
    assert not caplog.messages
    assert tokenizer.encode("I'm 12345 years old.") == default.encode("I'm 12345 years old.")
    assert (tokenizer.fingerprint, tokenizer.add_bos) == (default.fingerprint, False)


def train_sentencepiece(prefix: bool) -> bytes:
    """A small vocabulary from SentencePiece's own BPE trainer, with everything that Gemma's and Llama's have."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in SOURCES for line in text.splitlines() if line.strip()),
        model_writer=model,
        model_type="bpe",
        vocab_size=1200,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n", "\n\n", "<b>", "</b>", *([] if prefix else ["▁▁", "▁▁▁▁"])],
        minloglevel=2,
    )
    return model.getvalue()


def gguf_from_sentencepiece(model: bytes, prefix: bool) -> GgufTokenizerSource:
    from sentencepiece import sentencepiece_model_pb2 as found

    sentencepiece_model_pb2: Any = found  # whose classes are made when it is imported

    pieces = sentencepiece_model_pb2.ModelProto.FromString(model).pieces
    return GgufTokenizerSource(
        Path("trained.gguf"),
        {
            "tokenizer.ggml.model": "llama",
            # llama.cpp's converter writes user-defined pieces as the text they stand for
            "tokenizer.ggml.tokens": [p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in pieces],
            "tokenizer.ggml.scores": np.array([p.score for p in pieces], np.float32),
            "tokenizer.ggml.token_type": np.array([p.type for p in pieces], np.int32),
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": prefix,
        },
    )


@pytest.fixture(scope="module", params=[False, True], ids=["gemma-like", "llama-like"])
def trained(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any, bool]:
    import sentencepiece

    model = train_sentencepiece(request.param)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return Tokenizer.from_source(gguf_from_sentencepiece(model, request.param)), processor, request.param


@settings(deadline=None, max_examples=300)
@given(texts)
def test_sentencepiece_ids_and_texts(trained: tuple[Tokenizer, Any, bool], text: str) -> None:
    tokenizer, processor, prefix = trained
    if prefix:  # as in transformers and llama.cpp, a space is put after each user-defined symbol too
        text = text.replace("\n", "").replace("<b>", "").replace("</b>", "")
    ids = tokenizer.encode(text)
    assert ids == [1, *processor.EncodeAsIds(text)]
    assert tokenizer.decode(ids) == processor.DecodeIds(ids[1:]) == text.replace("▁", " ")


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 1199), max_size=30), skip=st.booleans())
def test_sentencepiece_streams(trained: tuple[Tokenizer, Any, bool], ids: list[int], skip: bool) -> None:
    tokenizer = trained[0]
    stream = tokenizer.stream(skip_special=skip)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids, skip_special=skip)


def test_what_a_gguf_file_leaves_out_has_llama_cpps_defaults(smollm: Tokenizer) -> None:
    source = gguf_from_sentencepiece(train_sentencepiece(False), False)
    whole, bare = (
        Tokenizer.from_source(source),
        Tokenizer.from_source(gguf_of(source, bos_token_id=None, eos_token_id=None)),
    )
    assert (bare.bos_id, bare.eos_ids, bare.encode("ab")) == (1, {2}, whole.encode("ab"))
    smollms = open_checkpoint("smollm2-135m").tokenizer_source
    untyped = Tokenizer.from_source(gguf_of(smollms, token_type=None))
    assert untyped.encode("a fox<|im_end|>") == smollm.encode("a fox<|im_end|>")
    tokens = list(smollms.metadata["tokenizer.ggml.tokens"])  # type: ignore[union-attr]
    tokens[3:5] = ["", ""]
    assert Tokenizer.from_source(gguf_of(smollms, tokens=tokens)).token_text(4) == "[EMPTY_4]"


def test_sentencepiece_bytes(trained: tuple[Tokenizer, Any, bool]) -> None:
    tokenizer, processor, _ = trained
    assert tokenizer.token_bytes(processor.PieceToId("<0xE2>")) == b"\xe2"
    assert tokenizer.token_text(processor.PieceToId("<0xE2>")) == "\\xe2"
    assert tokenizer.token_bytes(processor.PieceToId("▁")) == b" "
    assert tokenizer.token_bytes(processor.PieceToId("▁▁")) == b"  "
    assert tokenizer.token_bytes(processor.PieceToId("▁the")) == b" the"
    assert (tokenizer.token_bytes(1), tokenizer.token_text(1), tokenizer.add_bos) == (b"", "<s>", True)


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """A Hugging Face directory with the same tokenizer."""
    tokenizer.backend.encode_special_tokens = False
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def directory_tokenizer(smollm: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_source(HfTokenizerSource(save(smollm, tmp_path_factory.mktemp("model"))))


@settings(deadline=None)
@given(texts)
def test_a_directory_gives_the_same_ids(smollm: Tokenizer, directory_tokenizer: Tokenizer, text: str) -> None:
    ids = smollm.encode(text)
    assert directory_tokenizer.encode(text) == ids
    assert directory_tokenizer.decode(ids) == smollm.decode(ids)


def test_a_directory_says_the_same_of_itself(smollm: Tokenizer, tmp_path: Path) -> None:
    end = {"__type": "AddedToken", "content": "<|im_end|>"}
    save(smollm, tmp_path, bos_token="<|im_start|>", eos_token=end, chat_template="{{ eos_token }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    other = Tokenizer.from_source(HfTokenizerSource(tmp_path))
    assert other.fingerprint == smollm.fingerprint
    assert (other.vocab_size, other.special_ids, other.bos_id) == (49152, smollm.special_ids, 1)
    assert (other.eos_ids, other.add_bos) == ({0, 2, 5}, False)
    assert other.chat([{"role": "user", "content": "x"}]) == "<|im_end|>"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_source(HfTokenizerSource(tmp_path)).chat_template == "from the file"


def test_a_directorys_post_processor_adds_bos(smollm: Tokenizer, tmp_path: Path) -> None:
    save(smollm, tmp_path, bos_token="<|im_start|>", chat_template=[{"name": "default", "template": "<|im_start|>Hi"}])
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [("<|im_start|>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    backend.save(str(tmp_path / "tokenizer.json"))
    other = Tokenizer.from_source(HfTokenizerSource(tmp_path))
    plain = smollm.encode("Hi")
    assert other.add_bos
    assert [other.encode("Hi"), other.encode("Hi", add_bos=False)] == [[1, *plain], plain]
    assert other.encode_chat([{"role": "user", "content": ""}]) == [1, *plain]


def test_a_directory_that_cannot_be_read_is_refused(smollm: Tokenizer, tmp_path: Path) -> None:
    source = HfTokenizerSource(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_source(source)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.from_source(source)
    save(smollm, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not JSON"):
        Tokenizer.from_source(source)
    save(smollm, tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text()) | {"decoder": {"type": "CTC"}}
    state["decoder"] |= {"pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="CTC"):
        Tokenizer.from_source(source)
    save(smollm, tmp_path)
    other = Tokenizer.from_source(source)
    assert other.bos_id is None
    with pytest.raises(InvalidRequest, match="no BOS"):
        other.encode("x", add_bos=True)


@pytest.mark.models
def test_qwen_ids_are_those_of_transformers() -> None:
    def change(backend: tokenizers.Tokenizer) -> None:
        backend.normalizer = normalizers.NFC()  # as the model's own tokenizer.json has it

    tokenizer, reference = load("qwen2.5-coder-0.5b"), transformers_ids("qwen2.5-coder-0.5b", change)
    assert load("qwen2.5-coder-1.5b").fingerprint == tokenizer.fingerprint
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.add_bos) == (151936, {151643, 151645}, False)

    @settings(deadline=None, max_examples=500)
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == reference(text)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)

    check()
    for text in SOURCES:
        assert tokenizer.encode(text) == reference(text)


@pytest.mark.models
def test_gemma_ids_are_those_of_sentencepiece() -> None:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as found

    sentencepiece_model_pb2: Any = found  # whose classes are made when it is imported

    source = open_checkpoint("gemma3-270m").tokenizer_source
    assert isinstance(source, GgufTokenizerSource)
    meta = {key: source.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")}
    proto = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(*(list(values) for values in meta.values()), strict=True):
        proto.pieces.add(piece=token.replace(" ", "▁"), score=score, type=2 if token == "<unk>" else int(kind))
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = range(4)
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())
    tokenizer = Tokenizer.from_source(source)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (262144, 2, {1, 106}, True)

    @settings(deadline=None, max_examples=500)
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, parse_special=False, add_bos=True)
        assert ids == [2, *processor.EncodeAsIds(text)]
        assert tokenizer.decode(ids) == text.replace("▁", " ")

    check()
    for text in SOURCES:
        assert tokenizer.encode(text, parse_special=False, add_bos=True) == [2, *processor.EncodeAsIds(text)]
    assert tokenizer.encode("<bos>a<end_of_turn>", add_bos=False) == [2, *processor.EncodeAsIds("a"), 106]


def test_saved_and_opened_again_it_is_the_same(tmp_path: Path) -> None:
    """Ids, affixes, EOS ids and template."""
    write_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{{ messages[0].content }}"
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for affixes in [([], []), ([0], []), ([0], [1])]:
        saved = Tokenizer(
            backend,
            where=tmp_path,
            special_tokens=special,
            eos_ids=[1, 5],
            affixes=affixes,
            templates={"default": template},
        )
        saved.save(tmp_path)
        opened = Tokenizer.from_source(HfTokenizerSource(tmp_path))
        assert opened.fingerprint == saved.fingerprint
        plain = saved.encode("the fox", add_bos=False)
        assert opened.encode("the fox") == saved.encode("the fox") == [*affixes[0], *plain, *affixes[1]]
        assert (opened.eos_ids, opened.bos_id, opened.add_bos) == (saved.eos_ids, saved.bos_id, saved.add_bos)
        messages = [{"role": "user", "content": "fox"}]
        assert opened.encode_chat(messages) == saved.encode_chat(messages)

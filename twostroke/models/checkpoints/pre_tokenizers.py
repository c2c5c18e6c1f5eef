r"""Rules by which byte-level BPE splits text before merging, by their names in GGUF files (`tokenizer.ggml.pre`).

The names are those of llama.cpp (src/llama-vocab.cpp); the patterns are those of the models' own tokenizer.json files.
Patterns are of the Oniguruma library, which `tokenizers` uses.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level BPE splits text before merging; merges never cross a split.

    Each of `patterns` splits the pieces that the ones before it made: every match is a piece, and so is the text
    between two matches. With `ignore_merges` a piece that is in the vocabulary is one token, even if the merges do not
    produce it. `nfc` normalizes the text first. `add_bos` is the default where a file does not state it.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The splits, then the map from bytes to printable characters."""
        gpt2 = self.patterns[-1] == _GPT2  # which ByteLevel has built in
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == _DIGIT
            else pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            for pattern in (self.patterns[:-1] if gpt2 else self.patterns)
        ]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
        return pre_tokenizers.Sequence([*steps, last]) if steps else last


_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _TAIL
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
# Words of tekken and o200k begin with capitals or end with small letters, so "camelCase" is two.
_CAPITAL, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}]*[{_SMALL}]+|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}]+[{_SMALL}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}]*[{_SMALL}]+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}]+[{_SMALL}]*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}&&[^\p{{Han}}]]*[{_SMALL}&&[^\p{{Han}}]]+{_SUFFIX}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITAL}&&[^\p{{Han}}]]+[{_SMALL}&&[^\p{{Han}}]]*{_SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _TAIL
)
_EAST_ASIAN = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_HAN_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_AFMOE_SCRIPTS = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{309f}\x{30a0}-\x{30ff}\x{ff65}-\x{ff9f}"
    r"\x{2f00}-\x{2fdf}\x{e40}-\x{e7f}\x{e80}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}"
    r"\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?((?![\x{1d400}-\x{1d7ff}])[\p{Lu}\p{Ll}\p{Lt}])+",  # no mathematical letters
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001 (full-width punctuation is meant)
_THREE_DIGITS = r"[0-9][0-9][0-9]"

_DIGITS_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3_PRE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_PRE = PreTokenizer((_QWEN2,), nfc=True)
_O200K_PRE = PreTokenizer((_O200K,))
_BAILING_PRE = PreTokenizer((_BAILING,))
_DEEPSEEK3_PRE = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))

# llama.cpp's splits for a file that names none; they are those of few models.
DEFAULT = PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS))

_GROUPS: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): DEFAULT,
    ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe",
     "gigachat", "a.x-4.0", "mellum", "exaone4", "modern-bert", "jais", "trillion", "granite-docling"): _PLAIN_GPT2,
    ("mpt", "olmo"): PreTokenizer((_GPT2,), nfc=True),  # GPT-NeoX's tokenizer
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): _DIGITS_GPT2,
    ("command-r",): PreTokenizer((_DIGIT, _GPT2), nfc=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"):
        _LLAMA3_PRE,
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "stablelm2"): _QWEN2_PRE,
    ("hunyuan", "grok-2", "solar-open"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"): _O200K_PRE,
    ("kimi-k2",): PreTokenizer((_KIMI,)),
    ("seed-coder",): PreTokenizer((_SEED,)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _BAILING_PRE,
    ("deepseek-llm",): PreTokenizer(_DEEPSEEK_LLM),
    ("deepseek-coder",): PreTokenizer(_DEEPSEEK_CODER),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): _DEEPSEEK3_PRE,
    ("falcon",): PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE_DIGITS)),
    ("bloom", "poro-chat", "gpt3-finnish"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM, _DIGIT)),
    ("chameleon",): PreTokenizer(_CHAMELEON, add_bos=True),
    ("superbpe",): PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    # Digits in threes from the right.
    ("afmoe",): PreTokenizer((r"\p{N}{1,3}(?=(\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK3)),
}  # fmt: skip
PRE_TOKENIZERS = {name: pre for names, pre in _GROUPS.items() for name in names}

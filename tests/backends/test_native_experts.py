"""Mixtures of experts on the native backend: values as defined, bits that do not depend on other rows, no unused reads.

Every row is a sequence of one token, so that its attention is its value, and a model is a few lines of numpy.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.backends.test_native import products, raw_tensor, to_bfloat16
from twostroke.backends.native import library
from twostroke.backends.native import weights as packed
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor
from twostroke.system.scratch import address

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

TOKENS, EXPERTS, CHOSEN = 48, 20, 3
HEADS, KV_HEADS, DIM, PAGE_SIZE, EPS = 4, 2, 32, 16, 1e-6
ALL = range(TOKENS)


@dataclass
class Mlp:
    gate: RawTensor
    up: RawTensor
    down: RawTensor


@dataclass
class Block:
    norms: tuple[np.ndarray, np.ndarray]
    attention: list[RawTensor]  # q, k, v, o
    mlps: list[Mlp]
    router: np.ndarray | None = None  # [experts, hidden]
    normalized: bool = True
    choices: np.ndarray | None = None  # [tokens, chosen], in order


@dataclass
class Model:
    """Blocks with experts, without, and with. Routers give each token logits that are far from each other."""

    formats: Sequence[str]  # of one expert after another
    variant: str
    normalized: bool = True
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        nested = any(FORMATS[name].block_size > 32 for name in self.formats)
        self.hidden, self.intermediate = (256, 256) if nested else (288, 96)  # an odd number of groups where it can be
        self.random = np.random.default_rng(7)
        self.embed = raw_tensor("BF16", TOKENS, self.hidden, size=1.0)
        x = self.embed.dequantize().astype(np.float64)
        for kind in ("experts", "dense", "experts"):
            norms = tuple(self.random.uniform(0.5, 1.5, self.hidden).astype(np.float32) for _ in range(2))
            width, kv_width = HEADS * DIM, KV_HEADS * DIM
            shapes = [(width, self.hidden), (kv_width, self.hidden), (kv_width, self.hidden), (self.hidden, width)]
            block = Block((norms[0], norms[1]), [self._matrix("Q8_0", *shape) for shape in shapes], [])
            self.blocks.append(block)
            if kind == "dense":
                block.mlps.append(self._mlp("Q8_0", 64))
            else:
                block.mlps = [self._mlp(self.formats[i % len(self.formats)], self.intermediate) for i in range(EXPERTS)]
                logits = np.stack([self.random.permutation(EXPERTS) * 0.4 for _ in ALL])
                normed = self._normed(self._attended(x, block), block.norms[1])
                block.router = np.ascontiguousarray((np.linalg.pinv(normed) @ logits).T, np.float32)
                block.normalized = self.normalized
                block.choices = np.argsort(-logits)[:, :CHOSEN]
            x = self._block(x, block, None)

    def expected(self, dropout: np.ndarray | None = None) -> np.ndarray:
        """The results of all tokens, [tokens, hidden]."""
        x = self.embed.dequantize().astype(np.float64)
        for i, block in enumerate(self.blocks):
            x = self._block(x, block, None if dropout is None else dropout[i])
        return x

    def _mlp(self, name: str, intermediate: int) -> Mlp:
        shapes = [(intermediate, self.hidden)] * 2 + [(self.hidden, intermediate)]
        return Mlp(*(self._matrix(name, *shape) for shape in shapes))

    def _matrix(self, name: str, rows: int, cols: int) -> RawTensor:
        """Random weights with which outputs are as large as inputs."""
        seed = int(self.random.integers(1 << 30))
        size = 0.01 / raw_tensor(name, rows, cols, seed, 0.01).dequantize().std()
        return raw_tensor(name, rows, cols, seed, size * cols**-0.5)

    def _normed(self, x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm

    def _scaled(self, x: np.ndarray, norm: np.ndarray, raw: RawTensor) -> np.ndarray:
        """Products of normalized rows; kernels round rows before the division by the norm."""
        scales = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
        return self._products(x * norm, raw) * scales

    def _products(self, x: np.ndarray, raw: RawTensor) -> np.ndarray:
        return products(x.astype(np.float32), raw, self.variant)

    def _attended(self, x: np.ndarray, block: Block) -> np.ndarray:
        values = to_bfloat16(self._scaled(x, block.norms[0], block.attention[2]))
        heads = values.reshape(len(x), KV_HEADS, DIM).repeat(HEADS // KV_HEADS, axis=1)
        return x + self._products(heads.reshape(len(x), -1), block.attention[3])

    def _block(self, x: np.ndarray, block: Block, dropout: np.ndarray | None) -> np.ndarray:
        x = self._attended(x, block)
        factors = block.norms[1] if dropout is None else block.norms[1] * dropout

        def passed(mlp: Mlp, rows: np.ndarray) -> np.ndarray:
            some = x[rows]
            scales = 1 / np.sqrt((some**2).mean(-1, keepdims=True) + EPS)
            inputs = some * (factors if factors.ndim == 1 else factors[rows])
            gate, up = (self._products(inputs, raw) * scales for raw in (mlp.gate, mlp.up))
            return self._products(gate / (1 + np.exp(-gate)) * up, mlp.down)

        everything = np.arange(len(x))
        if block.router is None:
            return x + passed(block.mlps[0], everything)
        logits = self._normed(x, factors) @ block.router.T.astype(np.float64)
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :CHOSEN]
        if dropout is None:
            assert (chosen == block.choices).all()
        weights = np.take_along_axis(probabilities, chosen, -1)
        if block.normalized:
            weights /= weights.sum(-1, keepdims=True)
        out = x.copy()
        for expert in range(EXPERTS):
            rows, slots = np.nonzero(chosen == expert)
            if len(rows):
                out[rows] += weights[rows, slots][:, None] * passed(block.mlps[expert], rows)
        return out


class Unreadable(ctypes.Structure):
    """The Matrix of native/weights.h, with an address that must not be read."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("format", "rows", "cols")),
        ("memory", ctypes.c_void_p * 2),
        ("data", ctypes.c_void_p),
        ("highest", ctypes.c_float),
    ]

    @classmethod
    def of(cls, matrix: packed.PackedMatrix) -> "Unreadable":
        copy = cls.from_buffer_copy(ctypes.string_at(matrix.handle, ctypes.sizeof(cls)))
        assert (copy.rows, copy.cols) == matrix.shape
        assert copy.data
        copy.data = 1 << 20
        return copy


class Native:
    """The same model in the native backend, driven by its C interface."""

    def __init__(self, model: Model, threads: int, read: Sequence[set[int]] | None = None) -> None:
        """`read`: the experts of each block that may be read; None for all."""
        self.model, self.team = model, library.ThreadTeam(model.variant, threads)
        self.library = self.team.library
        self.matrices: list[packed.PackedMatrix] = []
        kept: list[object] = [self.matrices]
        embed = self._handle(model.embed)
        sizes = model.hidden, 64, 0, 1, 0, HEADS * DIM, KV_HEADS * DIM, DIM // 2, TOKENS, 0
        fields = library.NativeConfig(*sizes, EPS, 1.0, 1.0, 0.0, 0.0)
        norm = np.ones(model.hidden, np.float32)
        kept += [norm, model]
        self.handle = self.library.twostroke_model(self.team.handle, ctypes.byref(fields), embed, embed, address(norm))
        self.team.free_with(self, self.library.twostroke_model_free, self.handle, kept)
        for number, block in enumerate(model.blocks):
            norms = (ctypes.c_void_p * 9)(*(address(norm) for norm in block.norms), None, None, None, None)
            attention = [self._handle(raw) for raw in block.attention]
            heads = library.NativeAttention(
                HEADS, KV_HEADS, DIM, 0, KV_HEADS, 0, 0, 0, 0, 0, number, 1, 0, 0, DIM**-0.5
            )
            biases, mlps = (ctypes.c_void_p * 6)(), []
            for expert, mlp in enumerate(block.mlps):
                for raw in (mlp.gate, mlp.up, mlp.down):
                    mlps.append(self._handle(raw))
                    if read is not None and block.router is not None and expert not in read[number]:
                        kept.append(unreadable := Unreadable.of(self.matrices[-1]))
                        mlps[-1] = ctypes.addressof(unreadable)
            if block.router is None:
                matrices = (ctypes.c_void_p * 7)(*attention, *mlps)
                self.library.twostroke_add_block(self.handle, norms, matrices, biases, ctypes.byref(heads))
            else:
                self.library.twostroke_add_experts_block(
                    self.handle,
                    norms,
                    (ctypes.c_void_p * 4)(*attention),
                    biases,
                    ctypes.byref(heads),
                    address(block.router),
                    EXPERTS,
                    CHOSEN,
                    block.normalized,
                    0,
                    1,
                    1,
                    1.0,
                    (ctypes.c_void_p * len(mlps))(*mlps),
                    0,
                    None,
                )

    def _handle(self, raw: RawTensor) -> int:
        self.matrices.append(packed.PackedMatrix(self.team, raw))
        return self.matrices[-1].handle

    def forward(
        self, tokens: Sequence[int] | np.ndarray, wanted: np.ndarray | None = None, dropout: np.ndarray | None = None
    ) -> np.ndarray:
        """[wanted, hidden]; `dropout`: [blocks, tokens, hidden]."""
        n, blocks = len(tokens), len(self.model.blocks)
        ids, pages, zeros = np.array(tokens, np.int64), np.arange(n), np.zeros(n, np.int64)
        starts = np.arange(n + 1, dtype=np.int32)
        spans = np.stack([zeros, zeros + 1, zeros, pages], -1).astype(np.int32)
        rows = pages if wanted is None else wanted.astype(np.int64)
        cos, sin = np.ones((1, 1, DIM // 2), np.float32), np.zeros((1, 1, DIM // 2), np.float32)
        kv = np.zeros((blocks, 2, n, KV_HEADS, PAGE_SIZE * DIM), np.uint16)
        strides = library.array_strides([kv])
        fields = library.NativeBatch(
            n,
            n,
            *(address(array) for array in (ids, pages, zeros, zeros, starts, starts, spans, cos, sin)),
            1,
            num_wanted=len(rows),
            wanted=address(rows),
        )
        if dropout is not None:
            fields.dropout = address(dropout)
        out = np.empty((len(rows), self.model.hidden), np.float32)
        self.library.twostroke_forward(self.handle, ctypes.byref(fields), address(kv), strides, address(out))
        self.team.settle()
        return out


@pytest.fixture(params=library.VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in library.variants():
        pytest.skip(f"the {request.param} kernels cannot run here")
    return request.param


def same(found: np.ndarray, expected: np.ndarray, variant: str) -> None:
    """Whether results agree.

    A value between two steps may be rounded either way; rows without such a value agree up to float32 rounding. AMX
    also rounds weights.
    """
    errors = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert errors.max() <= 0.03
    if variant != "amx":
        assert (errors <= 1e-6).mean() > 0.7


@pytest.mark.thinned(2)
@pytest.mark.parametrize("normalized", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_values(name: str, normalized: bool, variant: str) -> None:
    model = Model([name], variant, normalized)
    same(Native(model, 2).forward(ALL), model.expected(), variant)


def test_experts_of_several_formats(variant: str) -> None:
    model = Model(packed.FORMATS, variant)
    same(Native(model, 2).forward(ALL), model.expected(), variant)


def test_dropout(variant: str) -> None:
    """It also applies to the router's input."""
    model = Model(["Q8_0"], variant)
    factors = np.random.default_rng(1).uniform(0.98, 1.02, (3, TOKENS, model.hidden)).astype(np.float32)
    factors[:, ::2] = 1
    same(Native(model, 2).forward(ALL, dropout=factors), model.expected(factors), variant)


@pytest.mark.thinned
@pytest.mark.parametrize("name", packed.FORMATS)
def test_a_row_is_the_same_in_any_company(name: str, variant: str) -> None:
    model = Model([name], variant)
    alone = Native(model, 1)
    expected = np.concatenate([alone.forward([token]) for token in ALL])
    random = np.random.default_rng(3)
    for threads in (1, 2, 5):
        native = Native(model, threads)
        for count in (2, 17, 600):
            tokens = random.integers(0, TOKENS, count)
            assert np.array_equal(native.forward(tokens), expected[tokens])
            some = np.flatnonzero(random.random(count) < 0.3)
            assert np.array_equal(native.forward(tokens, wanted=some), expected[tokens[some]])
        assert np.array_equal(native.forward(ALL[::-1]), expected[::-1])


@pytest.mark.parametrize("tokens", [[5], [40, 2], [1, 9, 30, 9, 1] * 40])
def test_experts_that_no_row_chose_are_not_read(tokens: list[int], variant: str) -> None:
    model = Model(["Q4_K"], variant)
    read = [
        set(block.choices[tokens].ravel().tolist()) if block.choices is not None else set() for block in model.blocks
    ]
    assert all(len(some) < EXPERTS for some in read)
    assert np.array_equal(Native(model, 2, read).forward(tokens), Native(model, 2).forward(tokens))


def test_of_equal_logits_the_lower_expert_comes_first(variant: str) -> None:
    model = Model(["Q8_0"], variant)
    first = model.blocks[0]
    assert first.router is not None
    assert first.choices is not None
    for token in (0, 1, 2):
        best = first.choices[token]
        router = first.router.copy()
        router[sorted(set(range(EXPERTS)) - set(best[:-1].tolist()))] = router[best[-1]]  # all but two are equal
        tied = replace(model, blocks=[])
        tied.blocks = [replace(first, router=router)]
        lowest = min(set(range(EXPERTS)) - set(best[:-1].tolist()))
        native = Native(tied, 2, [{*best[:-1].tolist(), lowest}])
        assert np.isfinite(native.forward([token])).all()


def test_a_row_of_no_numbers_changes_no_other(variant: str) -> None:
    model = Model(["Q4_K"], variant)
    expected = Native(model, 2).forward(ALL)
    model.embed.data.view(np.uint16)[7] = 0x7FC0
    found = Native(model, 2).forward(ALL)
    others = [token for token in ALL if token != 7]
    assert np.array_equal(found[others], expected[others])
    assert np.isnan(found[7]).all()

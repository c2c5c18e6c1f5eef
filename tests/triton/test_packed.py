"""Weights in GGUF formats on the device: the values of the formats, and products of the same bits by any way."""

import numpy as np
import pytest
import torch

from twostroke.backends.triton.kernels import packed as kernels
from twostroke.backends.triton.linear import DenseMatrix, GatedLinear, Linear, UnpackBuffer, place
from twostroke.backends.triton.packed import PACKED_FORMATS, ROWS, RepackedMatrix
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor

HEIGHT = 72  # of a gated pair: no whole tiles


def random_matrix(format: str, rows: int, columns: int, seed: int = 0) -> RawTensor:
    """Random bytes, except for float16 scales, which are small."""
    random, fmt = np.random.default_rng(seed), FORMATS[format]
    data = random.integers(0, 256, (rows, columns // fmt.block_size, fmt.block_bytes), np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(format, (0,))
    for at in halves:
        scale = random.uniform(0.001, 0.02, data.shape[:2]).astype("<f2")
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
    return RawTensor.from_bytes("w", format, (rows, columns), data.reshape(-1), "random")


def columns_of(format: str) -> int:
    """A width that no tile divides, where the format has one."""
    return 768 if PACKED_FORMATS[format].block == 256 else 416


@pytest.mark.parametrize("format", list(PACKED_FORMATS))
def test_unpacked_values_are_those_of_the_format(format: str, device: torch.device) -> None:
    raw = random_matrix(format, 100, columns_of(format))
    matrix = place(raw, str(device))
    assert isinstance(matrix, RepackedMatrix)
    values = raw.dequantize()
    scratch = UnpackBuffer(str(device))
    scratch.reserve(matrix)
    made = scratch.unpacked(matrix, 100).cpu()
    assert torch.equal(made, torch.from_numpy(values).to(torch.bfloat16))
    ids = torch.tensor([3, 99, 64, 63], dtype=torch.int32, device=device)
    rows = torch.empty(4, values.shape[1], dtype=torch.float32, device=device)
    kernels.unpack_kernel[(4, matrix.blocks)](
        *matrix.arrays, ids, rows, 0.5, 100, values.shape[1], matrix.units, 1, True, False, matrix.form.code
    )
    assert np.array_equal(rows.cpu().numpy(), values[ids.cpu().numpy()] * np.float32(0.5))


@pytest.mark.parametrize("format", list(PACKED_FORMATS))
def test_products(format: str, device: torch.device) -> None:
    """By unpacking in registers as by unpacking first, with three matrices side by side of which one is odd."""
    columns, where = columns_of(format), str(device)
    raws = [random_matrix(format, rows, columns, rows) for rows in (64, 40, 70)]
    linear = Linear([place(raw, where) for raw in raws], UnpackBuffer(where))
    x = torch.randn(256, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    results = []
    for tokens in (5, 70):
        out = torch.full((linear.segments * 256 * 174,), torch.nan, dtype=torch.float32, device=device)
        linear(x, out, tokens)
        results.append(linear.made(out, tokens).sum(0)[:5].cpu())
    weights = torch.from_numpy(np.concatenate([raw.dequantize() for raw in raws])).to(torch.bfloat16)
    expected = x[:5].float().cpu() @ weights.float().T
    assert torch.allclose(results[0], expected, rtol=1e-4, atol=1e-3 * expected.abs().max().item())
    if device.type == "cuda":
        assert torch.equal(*results)
    else:  # the interpreter adds in another order
        assert torch.allclose(*results, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("formats", [("Q4_K", "Q4_K"), ("Q6_K", "Q8_0"), ("BF16", "BF16"), ("Q5_0", "Q5_0")])
def test_gated_products(formats: tuple[str, str], device: torch.device) -> None:
    where, columns = str(device), 512
    raws = []
    for seed, format in enumerate(formats):
        if format == "BF16":
            bits = (
                np.random.default_rng(seed).standard_normal((HEIGHT, columns)).astype(np.float32).view(np.uint32) >> 16
            )
            data = bits.astype("<u2").view(np.uint8).reshape(-1)
            raws.append(RawTensor.from_bytes("w", "BF16", (HEIGHT, columns), data, "random"))
        else:
            raws.append(random_matrix(format, HEIGHT, columns, seed))
    gate, up = (place(raw, where) for raw in raws)
    gated = GatedLinear(gate, up, False, UnpackBuffer(where))
    x = torch.randn(256, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    results = []
    for tokens in (3, 100):
        out = torch.full((256, HEIGHT), torch.nan, dtype=torch.bfloat16, device=device)
        gated(x, out, tokens)
        results.append(out[:3].float().cpu())
    gates, ups = (torch.from_numpy(raw.dequantize()).to(torch.bfloat16).float() for raw in raws)
    wide = x[:3].float().cpu()
    expected = torch.nn.functional.silu(wide @ gates.T) * (wide @ ups.T)
    assert torch.allclose(results[0], expected, rtol=0.02, atol=0.01 * expected.abs().max().item())
    assert torch.allclose(*results, rtol=0.01, atol=1e-4 * expected.abs().max().item())
    if device.type == "cuda":
        assert torch.equal(*results)


def test_a_matrix_of_another_format_becomes_bfloat16(device: torch.device) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, 32)).astype(np.float32)
    raw = RawTensor.from_bytes("w", "F32", values.shape, values.view(np.uint8).reshape(-1), "random")
    matrix = place(raw, str(device))
    assert isinstance(matrix, DenseMatrix)
    assert torch.equal(matrix.matrix.cpu(), torch.from_numpy(values).to(torch.bfloat16))

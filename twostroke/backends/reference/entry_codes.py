"""K and V as pages hold them, on PyTorch tensors: the same bits as `models.kv_formats` makes."""

import torch

from twostroke.models.kv_formats import SCALE_BYTES, Codes, KVFormat, in_one_byte, rotated_together, two_of_byte


def entries_of(k: torch.Tensor, v: torch.Tensor, stored: KVFormat) -> list[torch.Tensor]:
    """K and V as pages hold them, parts of [N, Hkv, width]: the same bits as `KVFormat.encode` makes."""
    if not stored.codes:
        return [one.to(getattr(torch, stored.name)) for one in (k, v)]
    other = getattr(torch, stored.other.name)
    sides = zip((k, v), stored.codes, strict=True)
    return [torch.cat([encoded(side.to(other).float(), codes) for side, codes in sides], -1)]


def numbers_of(kv: torch.Tensor, stored: KVFormat, *index: torch.Tensor) -> list[torch.Tensor]:
    """K and V of pages in float32: what `index` takes of [pages, Hkv, page_size, D]."""
    if not stored.codes:
        sides = [part[index].float() for part in kv]
        return [sides[0], sides[-1]]  # one part is both
    records, cut = kv[0][index], stored.key_width(kv.shape[-1])
    sides = zip((records[..., :cut], records[..., cut:]), stored.codes, strict=True)
    return [decoded(side, codes) for side, codes in sides]


def encoded(entries: torch.Tensor, codes: Codes) -> torch.Tensor:
    """[..., D] float32 -> [..., width] uint8, as `Codes.encode`."""
    entries = rotated(entries)
    top = entries.abs().amax(-1, keepdim=True)
    most = torch.full_like(top, codes.max_code)  # PyTorch divides by a number in another way
    found = (entries * torch.where(top == 0, 0.0, most / top)).round().to(torch.int8).view(torch.uint8)
    if codes.bits == 4:
        found = in_one_byte(*found.chunk(2, -1))
    return torch.cat([found, (top / most).view(torch.uint8)], -1)


def decoded(stored: torch.Tensor, codes: Codes) -> torch.Tensor:
    """[..., width] -> [..., D] float32, as `Codes.decode`."""
    found, scales = stored.split([stored.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    if codes.bits == 4:
        found = torch.cat(two_of_byte(found), -1)
    numbers = found.view(torch.int8).float() * scales.contiguous().view(torch.float32)
    return rotated(numbers) / rotated_together(numbers.shape[-1])


def rotated(numbers: torch.Tensor) -> torch.Tensor:
    """`models.kv_formats.rotated`, with the same bits."""
    block, half = rotated_together(numbers.shape[-1]), 1
    while half < block:
        first, second = numbers.unflatten(-1, (-1, 2, half)).unbind(-2)
        numbers, half = torch.stack([first + second, first - second], -2).flatten(-3), 2 * half
    return numbers

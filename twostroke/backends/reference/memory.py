"""The memory of a pool's pages on a PyTorch device."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from twostroke.backends.page_memory import HostMemory, Layout, PageMemory, host_kv_room
from twostroke.backends.reference.arrays import as_array, as_tensor
from twostroke.errors import OutOfPages
from twostroke.models.layer_groups import PageShape


def device_kv_room(device: str, weights: int) -> int:
    """`Backend.kv_room` on a PyTorch device: 70% of what the weights leave free on a GPU."""
    if torch.device(device).type != "cuda":
        return host_kv_room()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - weights) * 7 // 10


class DeviceMemory:
    """A `backends.page_memory.PageMemory` whose `storages` are tensors; reads and writes use numpy arrays or bytes."""

    layout: Layout = "plain"

    def __init__(self, num_pages: int, shape: PageShape, device: str) -> None:
        """Arguments as of `HostMemory`. Raises OutOfPages if there is no room."""
        try:
            self._pages = torch.zeros((num_pages, shape.page_bytes), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            raise OutOfPages(f"{device} has no room for {num_pages:,} KV pages: give it less (kv_bytes)") from None
        self.page_bytes, self._stored = shape.page_bytes, shape.stored
        self.storages: Sequence[Any] = [self._view(shape, group) for group in range(len(shape.groups))]
        # A rank without heads has pages of no bytes; no model with states is shared among ranks.
        none = torch.empty((num_pages, 0), device=device)
        whole = self.page_bytes > 0 and self.page_bytes % 4 == 0
        self.state_storage: Any = self._pages.view(torch.float32) if whole else none

    def _view(self, shape: PageShape, group: int) -> torch.Tensor:
        """All frames as pages of a group, [depth, parts, frames, Hkv, page_size, width]."""
        one, dtype = shape.of(group), shape.dtype_of(group)
        used, wanted = self._pages[:, : math.prod(one) * dtype.itemsize], getattr(torch, dtype.name)
        used = used.view(wanted) if self.page_bytes else used.to(wanted)  # a rank may have no heads
        return used.unflatten(1, one).permute(1, 2, 0, 3, 4, 5)

    def read_pages(self, frames: Sequence[int]) -> list[memoryview]:
        taken = self._pages[self._index(np.array(frames, np.int64))]
        if taken.is_cuda:
            pinned = self._pinned(len(taken))
            pinned.copy_(taken, non_blocking=True)
            torch.cuda.current_stream(taken.device).synchronize()
            taken = pinned
        return [page.data.toreadonly() for page in taken.cpu().numpy()]

    @contextmanager
    def filling(self, frame: int) -> Generator[memoryview]:
        data = self._pinned(1)
        yield data.numpy()[0].data
        # PyTorch keeps pinned bytes until they are copied.
        self._pages[frame].copy_(data[0], non_blocking=self._pages.is_cuda)

    def _pinned(self, count: int) -> torch.Tensor:
        """Room for pages in host memory; pinned if there is a device, which then copies at the speed of its link."""
        return torch.empty((count, self.page_bytes), dtype=torch.uint8, pin_memory=self._pages.is_cuda)

    def write_page(self, frame: int, data: memoryview | bytes) -> None:
        with self.filling(frame) as page:
            page[:] = data

    def copy_page(self, source: int, target: int) -> None:
        self._pages[target] = self._pages[source]

    def read(self, group: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return as_array(self._entries(group)[:, :, self._index(frames), self._index(slots)])

    def read_keys(self, group: int, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        keys = self._entries(group)[layer, 0, self._index(frames), self._index(slots)]
        return as_array(keys[..., : self._stored.key_width(keys.shape[-1])])

    def write(self, group: int, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        there = self._entries(group)
        there[:, :, self._index(frames), self._index(slots)] = as_tensor(entries.copy()).to(there)

    def _entries(self, group: int) -> torch.Tensor:
        """[depth, parts, frames, page_size, Hkv, width]"""
        return self.storages[group].transpose(3, 4)

    def _index(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(places.astype(np.int64)).to(self._pages.device)


def new_memory(num_pages: int, shape: PageShape, device: str) -> PageMemory:
    """Zeroed pages in ordinary memory or on a device. Raises OutOfPages."""
    return HostMemory(num_pages, shape) if device == "cpu" else DeviceMemory(num_pages, shape, device)

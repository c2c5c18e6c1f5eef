"""The memory of a pool's pages on a PyTorch device."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from twostroke.backends.page_memory import HostMemory, Layout, PageMemory, host_kv_room
from twostroke.backends.reference.operations import as_array, as_tensor
from twostroke.errors import OutOfPages
from twostroke.models.formats.blocks import numpy_dtype


def device_kv_room(device: str, weights: int) -> int:
    """`Backend.kv_room` on a PyTorch device: 70% of what the weights leave free on a GPU."""
    if torch.device(device).type != "cuda":
        return host_kv_room()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - weights) * 7 // 10


class DeviceMemory:
    """A `backends.page_memory.PageMemory` whose `storage` is a tensor; reads and writes use numpy arrays or bytes."""

    layout: Layout = "plain"

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str) -> None:
        """`shape`: [frames, layers, 2, Hkv, page_size, D]. Raises OutOfPages if there is no room."""
        try:
            pages = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        except torch.OutOfMemoryError:
            raise OutOfPages(f"{device} has no room for {shape[0]:,} KV pages: give it less (kv_bytes)") from None
        self._pages = pages.view(torch.uint8).reshape(shape[0], -1)
        self.page_bytes = self._pages.shape[1]
        self.storage = pages.permute(1, 2, 0, 3, 4, 5)
        self._entries = self.storage.transpose(3, 4)  # [layers, 2, frames, page_size, Hkv, D]

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

    def read(self, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return as_array(self._entries[:, :, self._index(frames), self._index(slots)])

    def read_keys(self, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return as_array(self._entries[layer, 0, self._index(frames), self._index(slots)])

    def write(self, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        self._entries[:, :, self._index(frames), self._index(slots)] = as_tensor(entries.copy()).to(self.storage)

    def _index(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(places.astype(np.int64)).to(self.storage.device)


def new_memory(shape: tuple[int, ...], dtype: str, device: str) -> PageMemory:
    """Zeroed pages in ordinary memory or on a device. Raises OutOfPages."""
    return HostMemory(shape, numpy_dtype(dtype)) if device == "cpu" else DeviceMemory(shape, dtype, device)

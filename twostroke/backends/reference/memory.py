"""Where the numbers of a pool's pages lie, on a device of PyTorch's."""

import numpy as np
import torch

from twostroke.backends.reference.operations import as_array, as_tensor


class DeviceMemory:
    """As `kv.memory.HostMemory`, with `storage` a tensor; what is read and written is numpy's."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str) -> None:
        """`shape`: [pages, layers, 2, Hkv, page_size, D]."""
        self.storage = torch.zeros(shape, dtype=getattr(torch, dtype), device=device).permute(1, 2, 0, 3, 4, 5)
        self._entries = self.storage.transpose(3, 4)  # [layers, 2, pages, page_size, Hkv, D]

    def read(self, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return as_array(self._entries[:, :, self._index(pages), self._index(slots)])

    def read_keys(self, layer: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return as_array(self._entries[layer, 0, self._index(pages), self._index(slots)])

    def write(self, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        self._entries[:, :, self._index(pages), self._index(slots)] = as_tensor(entries.copy()).to(self.storage)

    def _index(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(places.astype(np.int64)).to(self.storage.device)

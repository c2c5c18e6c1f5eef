"""NumPy's arrays and PyTorch's tensors, each as the other, also for bfloat16."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor that shares the array's memory. Also for bfloat16, which torch.from_numpy does not accept."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array from a tensor on any device, also for bfloat16."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def padded(queries: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[R, Hq, D] of each layer, with zeros where a layer has fewer heads, or smaller ones."""
    most, longest = (max((one.shape[axis] for one in queries), default=0) for axis in (1, 2))
    return [F.pad(one, (0, longest - one.shape[2], 0, most - one.shape[1])) for one in queries]

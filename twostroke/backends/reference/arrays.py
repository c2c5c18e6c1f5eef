"""NumPy's arrays and PyTorch's tensors, each as the other, also for bfloat16."""

import ml_dtypes
import numpy as np
import torch


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

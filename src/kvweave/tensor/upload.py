"""Small arrays of the host, sent to a device without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(numbers: NDArray[np.generic[Any]], device: torch.device) -> torch.Tensor:
    """A copy on a GPU, for which the host waits no longer than for its own part: a copy from memory that is not pinned
    may wait for all that the GPU has to do. On a CPU, the array itself."""
    here = torch.from_numpy(numbers)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)

"""The one table of tolerances for kernel tests: a kernel in a dtype against the float32 reference of the same inputs."""

from __future__ import annotations

import torch

# (relative, absolute): float32 sums in another order; half precisions round the result once.
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (8e-3, 8e-3),
    torch.float16: (1e-3, 1e-3),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within the table's row for the dtype of `actual`; NaN on either side fails."""
    relative, absolute = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=absolute)

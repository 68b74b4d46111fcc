"""One thread is enough for graphs this small, and leaves the machine to other tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

"""Attention backends: `ATTENTION_BACKENDS` in order of preference. A new backend is one file here and one row."""

from treadle.ir.registry import Registry

ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "cpu": "treadle.kernels.attention.cpu:CpuAttentionBackend",
        "torch": "treadle.kernels.attention.torch_reference:TorchAttentionBackend",
    },
)

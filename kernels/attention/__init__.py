"""Attention backends: `ATTENTION_BACKENDS` in order of preference. A new backend is one file here and one row, or a plugin's entry
point `attention.NAME` in group `treadle.kernels`; those come last."""

from treadle.ir.registry import Registry

ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "cpu": "treadle.kernels.attention.cpu:CpuAttentionBackend",
        "torch": "treadle.kernels.attention.torch_reference:TorchAttentionBackend",
    },
    group="treadle.kernels",
    prefix="attention.",
)

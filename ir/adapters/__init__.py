"""Adapters for families whose model code needs preparation before tracing; most need none.

A row is `architecture -> "module:function"`; the function takes the model on meta and changes it in place.
"""

from __future__ import annotations

from treadle.ir.registry import Registry

ADAPTERS = Registry("model adapter", {}, group="treadle.model_adapters")

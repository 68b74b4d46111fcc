"""Chooses an attention backend for each layer, and turns a step's metadata into what those backends take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from treadle.ir.errors import ConfigError, PluginError
from treadle.kernels.attention import ATTENTION_BACKENDS
from treadle.kernels.attention.interface import AttentionQuery, BoundAttention, CommonMetadata
from treadle.kernels.attention.selection import lowest_capture_support, select_backend
from treadle.kernels.native import NativeLibrary
from treadle.runtime.kv_specs import KVCacheGroup
from treadle.runtime.runner.model import AttentionShape


def native_source(backend: Any) -> str | None:
    """The native library that a backend needs, as its module declares it, or None."""
    return getattr(import_module(backend.__module__), "NATIVE_SOURCE", None)


class AttentionLayers:
    """The attention of all layers. Layers of one cache group and backend share one metadata a step."""

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        *,
        dtype: str,
        native: Mapping[str, NativeLibrary | None],
        backend: str,
        block_size: int,
    ):
        """One backend for each of `shapes`; `native` are the libraries at hand by name (None: there, but not loaded)."""
        self.dtype = dtype
        self._native = native
        self._backends: dict[int, Any] = {}
        self.passed_over: dict[str, str] = {}
        for shape in shapes:
            selection = select_backend(self._query(shape, block_size), backend, self._loadable())
            if reason := self._missing(selection.backend):
                raise ConfigError(f"attention backend {selection.backend.name!r} cannot serve this model: {reason}; compile it again")
            self._backends[shape.layer] = selection.backend
            self.passed_over.update(selection.passed_over)
        self.capture_support = lowest_capture_support(list(self._backends.values()))
        self._impls: dict[int, Any] = {}
        self._builders: dict[tuple[int, str], Any] = {}
        self._layers_of: dict[tuple[int, str], list[int]] = {}

    def _loadable(self) -> list[str]:
        """The backends in order of preference, without those whose native library the model does not bring."""
        names = []
        for name in ATTENTION_BACKENDS.names():
            try:
                reason = self._missing(ATTENTION_BACKENDS.get(name))
            except PluginError as error:
                reason = str(error)
            if reason:
                self.passed_over[name] = reason
            else:
                names.append(name)
        return names

    def _missing(self, backend: Any) -> str:
        """What a backend needs that the model does not bring, if anything."""
        needed = native_source(backend)
        return "" if needed is None or needed in self._native else f"the bundle holds no native library {needed!r}"

    def _query(self, shape: AttentionShape, block_size: int) -> AttentionQuery:
        return AttentionQuery(
            dtype=self.dtype,
            head_size=shape.head_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_size=block_size,
            window=shape.window,
            softcap=shape.softcap,
            sinks=shape.has_sinks,
        )

    @property
    def backend_names(self) -> list[str]:
        """The backends in use, each once."""
        return list(dict.fromkeys(backend.name for backend in self._backends.values()))

    def make_impl(self, shape: AttentionShape, sinks: torch.Tensor | None) -> Any:
        """The implementation of one layer."""
        backend = self._backends[shape.layer]
        impl = self._impls[shape.layer] = backend.make_impl(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=shape.scale,
            window=shape.window,
            softcap=shape.softcap,
            dtype=self.dtype,
            native=self._native.get(native_source(backend) or ""),
            sinks=sinks,
        )
        return impl

    def capture(self, layer: int, kv_cache: torch.Tensor) -> BoundAttention:
        """The layer's attention for a launch plan; needs `make_impl` and `make_builders` before."""
        key = next(key for key, layers in self._layers_of.items() if layer in layers)
        return self._impls[layer].capture(kv_cache, self._builders[key])

    def make_builders(
        self, groups: Sequence[KVCacheGroup], *, max_num_seqs: int, max_num_tokens: int, max_model_len: int, num_threads: int
    ) -> None:
        """Makes one metadata builder for each cache group and backend."""
        for index, group in enumerate(groups):
            for layer in group.layers:
                self._layers_of.setdefault((index, self._backends[layer].name), []).append(layer)
        for (index, name), layers in self._layers_of.items():
            block_size = groups[index].spec.block_size
            self._builders[index, name] = self._backends[layers[0]].make_builder(
                max_num_seqs=max_num_seqs,
                max_num_tokens=max_num_tokens,
                max_blocks_per_seq=-(-max_model_len // block_size) + 1,
                block_size=block_size,
                num_threads=num_threads,
            )

    def build(self, common: Sequence[CommonMetadata]) -> tuple[dict[int, Any], dict[int, torch.Tensor]]:
        """(metadata, slot mapping) by layer, from the common metadata of each cache group."""
        metadata: dict[int, Any] = {}
        slots: dict[int, torch.Tensor] = {}
        for (index, name), layers in self._layers_of.items():
            built = self._builders[index, name].build(common[index])
            metadata.update(dict.fromkeys(layers, built))
            slots.update(dict.fromkeys(layers, common[index].slot_mapping))
        return metadata, slots

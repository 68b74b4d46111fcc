"""Joins graph and kernels: emits artifacts, stores them by content, and writes bundles."""

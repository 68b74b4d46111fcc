"""Implementations of ops: CPU kernels in C++ and attention backends; each declares what it supports."""

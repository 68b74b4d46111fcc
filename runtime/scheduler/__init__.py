"""Decides which requests advance in a step and owns the KV blocks they use."""

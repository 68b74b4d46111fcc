"""Requests, scheduling, KV pages, the model runner, sampling, and the engine front ends."""

"""Quantization: passes that edit graph and weight plan together, and the table of schemes."""

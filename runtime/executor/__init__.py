"""Hides how many workers run a step and how to reach them."""

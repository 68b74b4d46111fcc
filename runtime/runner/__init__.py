"""Turns a scheduled step into tensors, runs the program, and samples."""

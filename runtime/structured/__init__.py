"""Structured output: answers that a grammar constrains. Backends, the compile pool, token masks. Imports no torch itself."""

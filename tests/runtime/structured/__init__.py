"""Tests of treadle.runtime.structured."""

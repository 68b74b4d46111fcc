"""Measurements that `treadle bench` runs: in this process, of a start, of a compile, and of any OpenAI-compatible server."""

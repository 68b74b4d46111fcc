"""Rewrites of meaning: canonicalise, raise, fuse, split, unify, and the pipeline that orders them."""

"""From logits to token ids: a stateless sampler, and the persistent batch that prepares its metadata."""

"""Attention over a cache that is ragged per head. `torch_ref` is always there; faster backends come beside it."""

"""Attention over edges sorted by target: the operator, its CPU and its Triton form."""

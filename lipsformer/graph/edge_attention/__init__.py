"""Attention over edges sorted by target: the operator and its kernels for CPU and CUDA."""

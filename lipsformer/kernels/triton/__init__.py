"""Triton kernels for GPUs; imported at the first call only, because Triton may not be installed."""

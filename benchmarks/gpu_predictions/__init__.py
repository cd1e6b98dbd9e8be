"""A GPU workbench without a GPU: what a training step would launch, move and keep."""

"""How a processor computes the formulas of ``lipsformer.layers`` faster, with the same results."""

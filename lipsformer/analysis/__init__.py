"""Instruments: Lipschitz bounds, estimates, their monitor and control, and cost profiles."""

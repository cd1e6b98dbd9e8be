"""Instruments: objects that the engine calls around every optimizer step and before evaluation.

`Monitor` records figures. `SpectralCap`, `Orthogonal` and `UpdateLimit` change the weights.
`BoundCheck` compares the proved bound of a model with a limit. `InstrumentBase` is the base of all
of them and says what the engine expects of its methods.
"""

from lipsformer.analysis.instruments.base import InstrumentBase
from lipsformer.analysis.instruments.bound_check import BoundCheck, BoundExceededError
from lipsformer.analysis.instruments.monitor import Monitor
from lipsformer.analysis.instruments.orthogonal import Orthogonal
from lipsformer.analysis.instruments.spectral_cap import SpectralCap
from lipsformer.analysis.instruments.update_limit import UpdateLimit

__all__ = [
    "BoundCheck",
    "BoundExceededError",
    "InstrumentBase",
    "Monitor",
    "Orthogonal",
    "SpectralCap",
    "UpdateLimit",
]

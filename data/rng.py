"""Randomness as a pure function of a key, so that resuming needs integers only.

Augmentation libraries draw from the global generators of `random`, `numpy` and `torch`. Here these
are seeded from a key, such as ("augment", seed, epoch, index), and left as they were found.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*key: int | str) -> int:
    """63-bit seed from a key; equal keys give equal seeds on every machine and in every process."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def kept(device: torch.device | None = None) -> Iterator[None]:
    """Leave the global generators as they were found, that of an accelerator included."""
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    accelerator = on_device = None
    if device is not None and device.type != "cpu":
        accelerator = torch.get_device_module(device)
        on_device = accelerator.get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if accelerator is not None:
            accelerator.set_rng_state(on_device, device)


def seed_all(*key: int | str, device: torch.device | None = None) -> None:
    """Seed the global generators from what the randomness is a function of; call within `kept`."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002  (timm draws from it)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def permutation(count: int, *key: int | str) -> np.ndarray:
    """Order of `count` samples; from numpy's frozen generator, whose stream no release changes."""
    seed = derive_seed(*key)
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).permutation(count)

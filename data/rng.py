"""Randomness as a pure function of a key, so that a resumed run needs to store integers only.

Augmentation libraries draw from the global generators of `random`, `numpy` and `torch`. The data
side seeds these from a key, such as ("augment", seed, epoch, index), and then restores them.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*key: int | str) -> int:
    """Hash a key to 63 bits. Equal keys give equal seeds in every process and on every machine."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def preserve_rng(device: torch.device | None = None) -> Iterator[None]:
    """Restore the states of the global generators at the end.

    Args:
        device: If it is an accelerator, the state of its generator is restored as well.
    """
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
    """Seed the global generators from a key. Call it within `preserve_rng`.

    Args:
        *key: What the random numbers are a function of.
        device: If it is an accelerator, its generator is seeded as well.
    """
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002  (timm draws from it)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def permutation(count: int, *key: int | str) -> np.ndarray:
    """Draw an order of `count` samples as a function of a key.

    It uses numpy's legacy generator, whose stream is frozen: no release of numpy changes it.
    """
    seed = derive_seed(*key)
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).permutation(count)

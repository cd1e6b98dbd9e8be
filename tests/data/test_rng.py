import contextlib
import random

import numpy as np
import torch

from data.rng import derive_seed, permutation, preserve_rng, seed_all


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def test_equal_keys_draw_equal_numbers_and_different_keys_different_ones():
    draws = {}
    for key in [("a", 1, 23), ("a", 12, 3), ("b", 1, 23)]:
        with preserve_rng():
            seed_all(*key)
            draws[key] = draw()
        with preserve_rng():
            seed_all(*key)
            assert draw() == draws[key]
    assert len({tuple(values) for values in draws.values()}) == 3


def test_global_states_are_left_as_found_even_after_an_error():
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
    expected = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
    with contextlib.suppress(ZeroDivisionError), preserve_rng():
        seed_all("key", 7)
        draw()
        raise ZeroDivisionError
    assert draw() == expected


def test_seeds_and_orders_are_those_of_another_process():
    assert derive_seed("order", 3) == 3898695566207217952
    assert permutation(11, "order", 3, 2).tolist() == [4, 10, 6, 1, 3, 5, 8, 2, 7, 9, 0]


def test_permutation_is_one_and_changes_with_the_epoch():
    orders = [permutation(101, "order", 3, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(101))
    assert not (orders[0] == orders[1]).all()
    assert not (orders[1] == orders[2]).all()

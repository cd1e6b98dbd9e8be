from benchmarks.turns import compare, take_turns


def test_every_candidate_is_measured_once_in_every_round():
    calls = []

    def measure(name):
        calls.append(name)
        return len(calls)

    found = take_turns("abc", measure, rounds=5, warmup=2)
    turns = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert [sorted(turn) for turn in turns] == [list("abc")] * 7
    counted = [number for own in found.values() for number in own]
    assert sorted(counted) == list(range(7, 22))  # the first 6 calls warm up


def test_candidates_are_compared_with_the_first_one_round_by_round():
    seconds = {"base": [8.0, 2.0, 3.0], "own": [2.0, 1.0, 6.0]}
    own = compare(seconds, {"base": 2**21, "own": 2**20})["own"]
    assert (own["speed_ratio_min"], own["speed_ratio"], own["speed_ratio_max"]) == (0.5, 2.0, 4.0)
    assert (own["peak_mb"], own["memory_ratio"]) == (1.0, 0.5)


def test_candidates_can_be_compared_with_another_one_than_the_first():
    ratios = compare({"a": [8.0], "b": [2.0]}, {"a": 2**21, "b": 2**20}, "b")
    assert ratios["a"]["speed_ratio"] == 0.25 and ratios["a"]["memory_ratio"] == 2.0

"""Every wrong value of every key is refused by one sentence that names it, or does no harm.

`--dry-run` makes all checks of a start. The fuzzer draws keys and wrong values from the schema: a
draw is accepted, or ends with exit code 2 and one line that names a drawn key. No draw may leave a
file, and none may end in a traceback.
"""

import contextlib
import dataclasses
import io
import random
import signal
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import train
from lipsformer.config import Config
from tests.runs import DIGITS, write_config

MODEL = {
    "name": "lipsformer_nano",
    "kwargs": {"embed_dim": 8, "depths": [1], "num_heads": [2], "split_sizes": [2]},
}
WRONG = {
    "type": ("{a: 1}", "[[1], 2]", "a word", "true"),
    "negative": ("-1", "-0.5", "[-1]", "[-1, -1]", "[-1, 0.5, 2]"),
    "zero": ("0", "0.0", "[0, 0]", "[0]"),
    "huge": ("1000000000", "1" + 30 * "0", "1e300", "[1e300, 1e300]", "[1000000000]"),
    "not finite": (".nan", ".inf", "[.nan, .nan, .nan]", "[.inf, .inf]"),
    "empty": ("", "null", "[]", "{}", "''"),
    "path": ("/nowhere/at/all", "/dev/null/below", "/proc/below", "x" * 300, "run.yaml"),
    "length": ("[0.5]", "[0.5, 0.5]", "[0.5, 0.5, 0.5]", "[0.5, 0.5, 0.5, 0.5]"),
    "name": ("no_such_name", "lipsformer_nano/", "../up", "rand-m9-xyz", "a\\0b"),
}
KWARGS = (
    *("embed_dim", "depths", "num_heads", "split_sizes", "patch_size", "mlp_ratio"),
    *("drop_path_rate", "drop_rate", "global_pool", "img_size", "device", "no_such_argument"),
)
SECONDS = 60  # for one draw


def keys() -> Iterator[str]:
    """All dotted keys of the schema, some arguments of the model and of the optimizer."""
    for section, kind in typing.get_type_hints(Config).items():
        yield from (f"{section}.{item.name}" for item in dataclasses.fields(kind))
    yield from (f"model.kwargs.{name}" for name in KWARGS)
    yield from ("optim.kwargs.no_such_argument", "optim.kwargs.caution", "optim.lrr", "no_section")


def draws() -> list[list[str]]:
    """All single mistakes in a fixed random order, followed by pairs of them."""
    chance = random.Random(17)
    single = [[f"{key}={value}"] for key in keys() for values in WRONG.values() for value in values]
    # A compiled model, and workers, are built at a start only.
    single = [draw for draw in single if draw != ["train.compile=true"]]
    chance.shuffle(single)
    pairs = [[chance.choice(single)[0], chance.choice(single)[0]] for _ in range(2000)]
    return [*single, *pairs]


def named(error: str, overrides: list[str]) -> bool:
    """Whether a message contains a drawn key; one of `kwargs` may be shown inside its mapping."""
    for override in overrides:
        key = override.partition("=")[0]
        section, _, name = key.rpartition(".")
        if key in error or (section.endswith("kwargs") and section in error and name in error):
            return True
    return False


def judge(folder: Path, overrides: list[str]) -> str:
    """ "accepted", "refused", or what is wrong about the outcome of one draw."""
    output, errors = io.StringIO(), io.StringIO()
    arguments = ["--config", str(folder / "run.yaml"), "--dry-run", *overrides]
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = train.main(arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    if left := [path.name for path in folder.iterdir() if path.name != "run.yaml"]:
        return f"left {left}"
    lines = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    if code == 0:
        return "accepted" if not lines else f"accepted, but said {lines}"
    if code != 2 or len(lines) != 1 or "Traceback" in errors.getvalue():
        return f"exit {code}: {errors.getvalue()[:300]}"
    return "refused" if named(lines[0], overrides) else f"names no key: {lines[0][:300]}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with nothing but a config of a tiny model."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {**DIGITS, "model": MODEL}
    write_config(tmp_path, settings, tmp_path / "out")
    return tmp_path


def assert_harmless(folder: Path, chosen: list[list[str]]) -> None:
    outcomes = {str(draw): judge(folder, draw) for draw in chosen}
    bad = {draw: found for draw, found in outcomes.items() if found not in ("accepted", "refused")}
    assert not bad, "\n".join(f"{draw}: {found}" for draw, found in bad.items())


def test_an_image_size_that_the_patches_do_not_divide(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    for more in ([], ["--dry-run"]):
        assert train.main(["--config", str(folder / "run.yaml"), *more, "data.img_size=33"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "data.img_size=33 in batches of 1: image size 33x33 is not a multiple of" in error
        assert [path.name for path in folder.iterdir()] == ["run.yaml"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_two_thousand_mistakes(folder: Path) -> None:
    assert_harmless(folder, draws()[:2000])

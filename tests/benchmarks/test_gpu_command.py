"""The command for a stranger with a GPU, with stand-ins for the GPU's tests and measurements."""

import json

import pytest

from benchmarks.gpu import main, no_tests, read_outcome, verify
from benchmarks.gpu_measure import predicted

XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure message="wrong">trace</failure></testcase>
<testcase classname="tests.a" name="breaks"><error message="fixture"/></testcase>
<testcase classname="tests.b" name="needs_two"><skipped message="fewer than two"/></testcase>
</testsuite></testsuites>"""


def slower(factor):
    def measured(record):
        if record["model"] == "vit_small_patch16_224":
            raise RuntimeError("CUDA out of memory")
        return {key: factor * value for key, value in predicted(record, "H100").items()}

    return measured


def test_the_outcome_of_the_tests_names_what_failed_and_what_was_skipped():
    assert read_outcome(XML) == {
        "passed": 1,
        "failed": ["tests.a::fails", "tests.a::breaks"],
        "skipped": ["tests.b::needs_two"],
    }
    assert read_outcome(XML.replace("failure", "x").replace("error", "x"))["failed"] == []


def test_report_holds_predictions_beside_measurements_and_what_failed(tmp_path, capsys):
    path = tmp_path / "report.json"
    failed = verify(path, lambda: read_outcome(XML), slower(1.25))
    assert failed is not None and "tests.a::fails" in failed
    assert "vit_small_patch16_224: RuntimeError: CUDA out of memory" in failed
    report = json.loads(path.read_text())
    rows = {(row["model"], row["figure"]): row for row in report["rows"]}
    swin, key = "swin_tiny_patch4_window7_224", "ms of a step, compiled"
    row = rows[swin, key]
    assert row["measured"] == pytest.approx(1.25 * row["predicted"])
    # 29.90 ms of lipsformer_swin_tiny against 19.41 ms would be a ratio of 1.54 in both columns
    ours = rows["lipsformer_swin_tiny", "compiled step over Swin-Tiny's"]
    assert ours["measured"] == pytest.approx(ours["predicted"])
    expected = rows["lipsformer_swin_tiny", key]["predicted"] / row["predicted"]
    assert ours["predicted"] == pytest.approx(expected)
    assert rows["vit_small_patch16_224", key]["measured"] is None
    assert f"| `{swin}` | {key} |" in capsys.readouterr().out


def test_some_models_are_measured_without_tests(tmp_path):
    path, names = tmp_path / "report.json", ["lipsformer_base", "lipsformer_swin_tiny"]
    assert verify(path, no_tests, slower(1.25), names) is None
    report = json.loads(path.read_text())
    assert {row["model"] for row in report["rows"]} == set(names)
    assert report["tests"]["skipped"] == ["all, because --models was given"]


def test_a_model_without_a_prediction_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--models", "lipsformer_huge"])
    with pytest.raises(SystemExit):
        main()
    assert "--models lipsformer_huge: nothing is predicted for it" in capsys.readouterr().err

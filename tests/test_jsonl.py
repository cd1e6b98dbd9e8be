import pytest

from lipsformer.jsonl import append_jsonl, read_jsonl
from tests.full_disk import full_disk


def test_records_come_back_in_order_up_to_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "log.jsonl"
    assert list(read_jsonl(path)) == []
    records = [{"epoch": 0, "loss": 1.5}, {"epoch": 1, "names": ["a", "b"]}]
    for record in records:
        append_jsonl(path, record)
    assert list(read_jsonl(path)) == records
    with path.open("a") as stream:
        stream.write('{"epoch": 2, "lo')
    assert list(read_jsonl(path)) == records
    append_jsonl(path, {"epoch": 2})
    assert list(read_jsonl(path)) == [*records, {"epoch": 2}]


def test_an_empty_line_hides_nothing_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(read_jsonl(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a":\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*log\.jsonl is no JSON"):
        list(read_jsonl(path))


def test_a_full_disk_costs_no_earlier_record(tmp_path):
    path = tmp_path / "log.jsonl"
    append_jsonl(path, {"epoch": 0})
    with path.open("a") as stream:
        stream.write('{"epoch": 1, "lo')
    with full_disk(3), pytest.raises(OSError, match="File too large"):
        append_jsonl(path, {"epoch": 1})
    assert list(read_jsonl(path)) == [{"epoch": 0}]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"seed": 0}\n{"seed": 1}')
    append_jsonl(path, {"seed": 2})
    assert list(read_jsonl(path)) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]

from lipsformer.jsonl import append_jsonl, read_jsonl


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

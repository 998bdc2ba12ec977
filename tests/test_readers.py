"""Tables from files, written here exactly as their usual writers do it."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jppo.data import read_rows
from jppo.readers import DataError, Rows, place, read_table

ROWS = [
    {"prompt": "a", "n": 1, "chat": [{"role": "user", "content": "é"}]},
    {"prompt": "b", "n": None, "chat": []},
    {"prompt": "c", "n": 3, "chat": [{"role": "user", "content": "x"}] * 2},
]


def parquet(path, rows=ROWS, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def saved(folder, *shards, split="train"):
    """A folder as `datasets.Dataset.save_to_disk` writes it (versions 4 and 5)."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        info = {"info": {"features": {}}, "fingerprint": "0123456789abcdef"}
        schema = table.schema.with_metadata({"huggingface": json.dumps(info)})
        with pa.OSFile(str(folder / name), "wb") as sink:
            with pa.ipc.new_stream(sink, schema) as writer:
                writer.write_table(table.cast(schema), max_chunksize=1)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    info = {"citation": "", "description": "", "features": {}, "homepage": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    return folder


def saved_dict(folder, **splits):
    """… and `datasets.DatasetDict.save_to_disk`."""
    for name, rows in splits.items():
        saved(folder / name, rows, split=name)
    text = json.dumps({"splits": list(splits)})
    (folder / "dataset_dict.json").write_text(text)
    return folder


def fails(path, says):
    with pytest.raises(DataError, match=says) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# Every form, one table


def test_json_lines(tmp_path):
    for name in ("rows.jsonl", "rows.json", "rows"):
        path = tmp_path / name
        path.write_text("\n\n".join(map(json.dumps, ROWS)), "utf-8")
        rows = read_table(path)
        assert rows == ROWS and isinstance(rows, list)
        assert rows.places == [f"{path}:{i}" for i in (1, 3, 5)]


def test_a_parquet_file_and_a_folder_of_them(tmp_path):
    path = parquet(tmp_path / "one.parquet", row_group_size=1, compression="zstd")
    assert read_table(path) == read_table(str(path)) == ROWS
    parquet(tmp_path / "two.parquet", ROWS[:1])
    rows = read_table(tmp_path)
    assert rows == [*ROWS, ROWS[0]]
    assert rows.places[2:] == [
        f"{tmp_path / 'one.parquet'}: row 2",
        f"{tmp_path / 'two.parquet'}: row 0",
    ]


def test_a_saved_data_set(tmp_path):
    folder = saved(tmp_path / "set", ROWS[:2], ROWS[2:])
    (folder / "cache-1.arrow").write_bytes(b"not a part of the data set")
    assert read_table(folder) == ROWS
    assert read_table(folder / "data-00001-of-00002.arrow") == ROWS[2:]


def test_the_order_of_shards_is_the_order_that_the_state_names(tmp_path):
    folder = saved(tmp_path / "set", ROWS[:2], ROWS[2:])
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert read_table(folder) == [ROWS[2], *ROWS[:2]]


def test_an_arrow_file_with_random_access(tmp_path):
    table, path = pa.Table.from_pylist(ROWS), tmp_path / "rows.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    assert read_table(path) == ROWS


def test_a_split_must_be_chosen(tmp_path):
    both = saved_dict(tmp_path / "both", train=ROWS, test=ROWS[:1])
    fails(both, r"holds the splits train, test: give one, as .*both/train$")
    assert read_table(both / "train") == ROWS and read_table(both / "test") == ROWS[:1]
    fails(both / "dev", "no such file; .*both holds the splits train, test")
    one = saved_dict(tmp_path / "one", train=ROWS)
    fails(one, "holds the splits train: give one")


def test_splits_in_the_names_of_parquet_files(tmp_path):
    """As the hub lays them out: train and test in one folder must not be mixed."""
    for i in (0, 1):
        parquet(tmp_path / f"train-0000{i}-of-00002.parquet", ROWS[i : i + 1])
    assert read_table(tmp_path) == ROWS[:2]
    parquet(tmp_path / "test-00000-of-00001-0a1b.parquet", ROWS[2:])
    fails(tmp_path, "holds the splits test, train: give one, as .*/test")
    assert read_table(tmp_path / "train") == ROWS[:2]
    assert read_table(tmp_path / "test") == ROWS[2:]
    fails(tmp_path / "dev", "no such file; .* holds the splits test, train")


# Errors


def test_rows_are_named_by_file(tmp_path):
    path = parquet(tmp_path / "rows.parquet")
    assert read_rows(path, ["prompt"]) == ROWS
    path = parquet(path, [{"prompt": "a"}, {"prompt": None}])
    with pytest.raises(DataError, match=r"rows.parquet: row 1: column 'prompt' must"):
        read_rows(path, ["prompt"])
    assert place(read_rows(path), 1) == f"{path}: row 1"
    assert (place([1], 0), place([1], 0, "prompt")) == ("row 0", "prompt 0")


def test_files_that_cannot_be_read(tmp_path):
    fails(tmp_path / "gone.parquet", "gone.parquet: no such file$")
    fails(tmp_path / "no" / "folder", "no such file$")
    fails(tmp_path, "neither Parquet files nor a data set saved by `datasets`")
    for name, says in (
        ("a.parquet", "not a Parquet file"),
        ("a.arrow", "not an Arrow"),
    ):
        for content in (b"", b"something else entirely", b"PAR1\0\0\0\0PAR1"):
            (tmp_path / name).write_bytes(content)
            fails(tmp_path / name, says)
    whole = parquet(tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "half.parquet").write_bytes(whole[: len(whole) // 2])
    fails(tmp_path / "half.parquet", "not a Parquet file")
    fails(parquet(tmp_path / "none.parquet", []), "no rows")


def test_saved_folders_that_are_broken(tmp_path):
    folder = saved(tmp_path / "set", ROWS)
    (folder / "data-00000-of-00001.arrow").unlink()
    fails(folder, "state.json names data-00000-of-00001.arrow, which is missing")
    (folder / "state.json").write_text("[]")
    fails(folder, r"state.json: expected an object, got '\[\]'")
    (folder / "state.json").write_text("{")
    fails(folder, "state.json: unreadable")
    index = {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}
    (folder / "state.json").write_text(json.dumps(index))
    fails(folder, r"save it again after flatten_indices\(\)")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = parquet(tmp_path / "rows.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    fails(path, r'needs pyarrow: pip install "jppo\[data\]"')


def test_rows_are_a_plain_list():
    rows = Rows.of(iter([("here", {"a": 1})]))
    assert rows == [{"a": 1}] and rows.places == ["here"]

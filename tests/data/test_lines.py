"""Lines are split on newlines only, in strict UTF-8, from any compression."""

import gzip
import io
import json
import sys

import pytest

from shortlist.data.lines import LineErrors, first_line, read_json_lines, read_lines, read_tab_separated
from shortlist.errors import ConfigError, DataError, MissingExtraError, MissingInputError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_separator_characters_inside_a_string_do_not_split_the_line(tmp_path):  # user-reports A.22
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    file = write(tmp_path / "x.jsonl", json.dumps({"t": text}, ensure_ascii=False) + "\n")
    raw = write(tmp_path / "x.tsv", f"1\t{text}\n2\tz\n")
    assert [value["t"] for _, value in read_json_lines(file)] == [text]
    assert [fields for _, fields in read_tab_separated(raw, (2,), expected="")] == [["1", text], ["2", "z"]]


def test_a_stray_quote_is_a_character_and_swallows_nothing(tmp_path):  # user-reports A.21
    lines = ['1\tan "open quote', "2\tplain", '3\t\'it"s"', '4\t"']
    file = write(tmp_path / "c.tsv", "\n".join(lines) + "\n")
    records = list(read_tab_separated(file, (2,), expected="id, text"))
    assert len(records) == file.read_bytes().count(b"\n") == 4
    assert [fields[1] for _, fields in records] == ['an "open quote', "plain", '\'it"s"', '"']


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path):
    file = write(tmp_path / "x", b"\xef\xbb\xbfone\r\ntwo\r\nthree")
    assert list(read_lines(file)) == [(1, "one"), (2, "two"), (3, "three")]


def test_latin1_bytes_are_refused_with_file_and_line(tmp_path):
    file = write(tmp_path / "x.tsv", b"1\tfine\n" + "2\tcafé\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"x\.tsv, line 2: byte 0xe9 at position 6 is not UTF-8.*iconv"):
        list(read_lines(file))


def test_utf16_is_named(tmp_path):
    with pytest.raises(DataError, match="is UTF-16; expected UTF-8"):
        list(read_lines(write(tmp_path / "x", "one\ntwo\n".encode("utf-16"))))


def test_a_broken_json_line_names_file_line_reason_and_what_was_expected(tmp_path):
    file = write(tmp_path / "x.jsonl", '{"a": 1}\n\n{"a": \n')
    with pytest.raises(DataError, match=r"x\.jsonl, line 3: not valid JSON \(.+\); expected an apple a line"):
        list(read_json_lines(file, expected="an apple a line"))


def test_a_pretty_printed_file_gets_a_hint(tmp_path):
    with pytest.raises(DataError, match="one JSON value over many lines; write one record a line"):
        list(read_json_lines(write(tmp_path / "x.json", json.dumps([{"a": 1}], indent=1))))


def test_skip_counts_lines_and_keeps_examples(tmp_path):
    file = write(tmp_path / "x.jsonl", b'{"a": 1}\nbroken\n\xff\n{"a": 2}\n{"t": "\\ud83d"}\n')
    errors = LineErrors("skip")
    assert [value for _, value in read_json_lines(file, errors=errors)] == [{"a": 1}, {"a": 2}]
    assert errors.count == 3
    assert "line 2" in errors.examples[0] and "line 3" in errors.examples[1] and "surrogate" in errors.examples[2]


@pytest.mark.parametrize(
    "line, where",
    [
        ({"_id": "d", "text": "a \ud800 b"}, 'line 1: "text" is not valid Unicode text'),
        ({"_id": "d", "metadata": {"url": ["\udfff"]}}, 'line 1: "metadata" is not valid'),
        ({"\ud800": 1}, r'line 1: "\\ud800" is not valid'),
        (["q", "\ud83d"], "line 1: not valid Unicode text"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_by_field(tmp_path, line, where):
    with pytest.raises(DataError, match=where):
        next(read_json_lines(write(tmp_path / "x.jsonl", json.dumps(line) + "\n")))


def test_escaped_emoji_is_whole(tmp_path):
    file = write(tmp_path / "x.jsonl", '{"t": "\\ud83d\\ude00"}\n')
    assert next(read_json_lines(file))[1] == {"t": "😀"}


def test_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="expected 'fail' or 'skip'"):
        LineErrors("ignore")


@pytest.mark.parametrize("name", ["x.gz", "no-suffix"])
def test_gzip_is_told_by_content(tmp_path, name):
    file = write(tmp_path / name, gzip.compress(b"one\n") + gzip.compress("zwö\n".encode()))
    assert [text for _, text in read_lines(file)] == ["one", "zwö"]


def test_zstandard_is_read_over_several_frames(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    content = zstandard.compress(b"one\ntw") + zstandard.compress(b"o\n")
    assert [text for _, text in read_lines(write(tmp_path / "x.zst", content))] == ["one", "two"]
    long = "\n".join(f"line {i} {'x' * (i % 97)}" for i in range(20_000))
    assert len(list(read_lines(write(tmp_path / "y.zst", zstandard.compress(long.encode()))))) == 20_000


def test_zstandard_missing_names_the_package(tmp_path, monkeypatch):
    file = write(tmp_path / "x.zst", b"\x28\xb5\x2f\xfd rest")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match="pip install zstandard"):
        first_line(file)


@pytest.mark.parametrize("kind", ["gzip", "zstandard"])
def test_a_file_cut_short_is_refused_not_ended(tmp_path, kind):
    compress = gzip.compress if kind == "gzip" else pytest.importorskip("zstandard").compress
    content = compress("\n".join(str(i * 7919) for i in range(5000)).encode())
    with pytest.raises(DataError, match="damaged or cut short"):
        list(read_lines(write(tmp_path / "x.gz", content[: len(content) // 2])))


def test_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(gzip.compress(b"a\nb\n"))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert [text for _, text in read_lines("-")] == ["a", "b"]


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(MissingInputError, match="does not exist"):
        list(read_lines(tmp_path / "none"))
    with pytest.raises(MissingInputError, match="is a directory"):
        list(read_lines(tmp_path))


def test_a_line_with_other_columns_is_named(tmp_path):
    with pytest.raises(DataError, match=r"line 2: 3 tab-separated fields; expected id and text"):
        list(read_tab_separated(write(tmp_path / "x", "1\ta\n2\tb\tc\n"), (2,), expected="id and text"))

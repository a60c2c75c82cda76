"""Commit, compact, merge, and what searches do under a filter, for indexes in memory and on disk."""

import json
from dataclasses import replace

import numpy as np
import pytest

from shortlist import ExactIndex, FaissIndex, open_index
from shortlist.data import Document
from shortlist.errors import ConfigError, DataError, IndexMismatchError, NonFiniteError, ShortlistError
from shortlist.indexes import build_index, lifecycle, new_index, searching, verify

VECTORS = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
IDS = [f"doc {row}" for row in range(400)]
QUERIES = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
SPECS = ["exact", "exact:int8", "flat", "HNSW8", "IVF4,Flat", "IVF4,PQ4x4fs+rescore", "SQ8"]


def documents(rows):
    return [Document(IDS[row], f"title {row}", "text", {"year": row}) for row in rows]


@pytest.fixture(params=SPECS)
def opened(request, tmp_path):
    build_index(
        tmp_path / "index", [(IDS[:200], VECTORS[:200])], dim=8, spec=request.param,
        documents=documents(range(200)), model={"name": "m", "fingerprint": "f00"},
    )  # fmt: skip
    return open_index(tmp_path / "index")


def found(index, k):
    return [[id for id, _ in result] for result in index.search(QUERIES, k)]


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_commit_appends_and_rewrites_nothing(opened, tmp_path):
    path = tmp_path / "index"
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.glob("segment-*/*")}
    opened.add(IDS[200:210], VECTORS[200:210], documents=documents(range(200, 210)))
    assert opened.remove(["doc 3", "doc 205"]) == 2
    expected = opened.search(QUERIES, 20)
    assert opened.commit() == 2
    after = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.glob("segment-*/*")}
    assert before.items() < after.items() and names(path) == [
        "manifest.json", "removed-00002.npy", "segment-00000", "segment-00001",
    ]  # fmt: skip
    verify(path)
    again = open_index(path)
    assert again.search(QUERIES, 20) == opened.search(QUERIES, 20) == expected
    assert len(again) == 208 and again.stats()["removed"] == 2 and again.stats()["tail"] == 10
    assert again.document("doc 207")["title"] == "title 207" and again.document("doc 205") is None
    assert again.model == {"name": "m", "fingerprint": "f00"}


def test_nothing_new_is_no_new_generation(opened, tmp_path):
    before = (tmp_path / "index" / "manifest.json").read_bytes()
    assert opened.commit() == 1 and (tmp_path / "index" / "manifest.json").read_bytes() == before


def test_search_settings_and_tuning_are_committed(opened, tmp_path):
    opened.settings = replace(opened.settings, nprobe=3, fetch=5.0)
    opened.tuning = {"recall@10": 0.97}
    assert opened.commit() == 2
    again = open_index(tmp_path / "index")
    assert again.settings == opened.settings and again.tuning == {"recall@10": 0.97}
    assert again.settings.nprobe == 3 and names(tmp_path / "index") == ["manifest.json", "segment-00000"]
    with pytest.raises(ConfigError, match="expected SearchSettings"):
        opened.settings = {"nprobe": 3}


def test_what_was_not_committed_is_not_there(opened, tmp_path):
    opened.add(["new"], VECTORS[:1])
    assert "new" not in open_index(tmp_path / "index") and "new" in opened


def test_compaction_drops_what_was_removed_and_merges_the_tail(opened, tmp_path):
    # user-reports C.78, C.81
    opened.add(IDS[200:300], VECTORS[200:300], documents=documents(range(200, 300)))
    opened.remove(IDS[:50] + IDS[250:260])
    opened.commit()
    opened.add(["late"], VECTORS[300:301], documents=[{"id": "late", "title": "late one"}])
    kept = IDS[50:250] + IDS[260:300] + ["late"]
    opened.compact()
    for index in (opened, None):
        if index is None:
            assert opened.commit() == 3
            index = open_index(tmp_path / "index")
        assert list(index.ids) == kept and index.stats()["removed"] == 0 and index.stats()["tail"] == 0
        assert [id for id, _ in index.search(VECTORS[300:301], 300)[0]] and len(index.search(QUERIES, 500)[0]) == 241
        assert index.document("late")["title"] == "late one" and index.document("doc 270")["metadata"] == {"year": 270}
        if index.lossless or index._keeps_vectors:
            assert np.array_equal(index.vectors_at([0, 239]), VECTORS[[50, 299]])
    assert names(tmp_path / "index") == ["manifest.json", "segment-00002"]
    verify(tmp_path / "index")


def test_a_compaction_in_memory_is_the_same_without_files():
    for spec in SPECS:
        index = new_index(spec, 8)
        index.add(IDS[:300], VECTORS[:300])
        index.remove(IDS[:300:3])
        before = found(index, 10)
        index.compact()
        assert index.stats()["removed"] == 0 and index.stats()["tail"] == 0 and len(index) == 200
        if index._only_vectors or spec == "flat":
            assert found(index, 10) == before
        else:
            assert sum(len({*now} & {*then}) for now, then in zip(found(index, 10), before, strict=True)) >= 35
        assert [len(ids) for ids in found(index, 300)] == [200] * len(QUERIES)


def test_until_it_is_committed_a_compaction_keeps_others_from_writing(opened, tmp_path):
    compacted, other = open_index(tmp_path / "index"), open_index(tmp_path / "index")
    compacted.remove(["doc 1"])
    compacted.compact()
    assert "doc 1" in open_index(tmp_path / "index")
    other.add(["new"], VECTORS[:1])
    with pytest.raises(ShortlistError, match="another process is writing"):
        other.commit()
    # A compaction that was forgotten holds nothing, and the next writer removes its files.
    del compacted
    assert other.commit() == 2 and names(tmp_path / "index") == ["manifest.json", "segment-00000", "segment-00001"]


def test_a_compaction_goes_on_growing_before_it_is_committed(opened, tmp_path):
    opened.remove(IDS[:10])
    opened.compact()
    opened.add(["new"], VECTORS[300:301])
    opened.remove(["doc 11"])
    opened.compact()
    opened.add(["newer"], VECTORS[301:302])
    opened.remove(["doc 12"])
    expected = opened.search(QUERIES, 10)
    assert opened.commit() == 2
    again = open_index(tmp_path / "index")
    assert again.search(QUERIES, 10) == expected and list(again.ids) == [IDS[10], *IDS[13:200], "new", "newer"]


def test_a_commit_on_a_directory_that_has_moved_on_is_refused(opened, tmp_path):
    other = open_index(tmp_path / "index")
    other.add(["theirs"], VECTORS[:1])
    assert other.commit() == 2
    opened.add(["ours"], VECTORS[:1])
    for step in (opened.commit, opened.compact):
        with pytest.raises(ShortlistError, match="generation 1 was read, generation 2 is there now.*open it again"):
            step()
    assert "ours" in opened and set(open_index(tmp_path / "index").ids) == {*IDS[:200], "theirs"}
    # Built anew it is another index, whatever its generation.
    build_index(tmp_path / "index", [(["x"], VECTORS[:1])], dim=8, overwrite=True)
    with pytest.raises(ShortlistError, match="open it again"):
        other.commit()


def test_an_index_in_memory_has_nothing_to_commit_to(tmp_path):
    index = ExactIndex(8)
    with pytest.raises(ConfigError, match=r"save\(path\)"):
        index.commit()


def test_many_commits_become_one_segment(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle, "_MOST_SEGMENTS", 3)
    for row in range(200, 209):
        opened.add([IDS[row]], VECTORS[row : row + 1])
        if row == 204:
            opened.remove(["doc 201"])
            opened.add(["doc 201"], VECTORS[201:202])
        opened.commit()
        assert len(open_index(tmp_path / "index").manifest) and len(list((tmp_path / "index").glob("segment-*"))) <= 4
    again = open_index(tmp_path / "index")
    assert sorted(again.ids) == sorted(IDS[:209]) and again.search(QUERIES, 300) == opened.search(QUERIES, 300)
    verify(tmp_path / "index")


def test_after_a_commit_what_was_added_is_read_from_its_file(tmp_path):
    build_index(tmp_path / "index", [(IDS[:200], VECTORS[:200])], dim=8)
    index = open_index(tmp_path / "index")
    index.add(IDS[200:300], VECTORS[200:300])
    assert index._ids._used == 100
    index.commit()
    assert index._ids._used == 0 and [len(view) for view in index.vectors()] == [200, 100]
    index.add(["more"], VECTORS[300:301])
    assert index.commit() == 3 and len(open_index(tmp_path / "index")) == 301


def test_statistics_say_what_the_index_is(opened, tmp_path):
    opened.remove(["doc 1"])
    opened.add(["new", "newer"], VECTORS[:2])
    opened.commit()
    stats = opened.stats()
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert stats["spec"] == opened.spec == manifest["spec"] and stats["kind"] == opened.kind
    assert (stats["count"], stats["removed"], stats["segments"], stats["generation"]) == (201, 1, 2, 2)
    assert stats["bytes"] == sum(file.stat().st_size for file in (tmp_path / "index").rglob("*.*")) - len(
        (tmp_path / "index" / "manifest.json").read_bytes()
    )
    assert stats["bytes_per_vector"] == round(stats["bytes"] / 201, 1) and stats["model"] == "m" and stats["dim"] == 8
    assert ExactIndex(8).stats()["bytes"] is None


def test_blocks_give_everything_in_order(opened):
    opened.remove(["doc 2"])
    opened.add(["new"], VECTORS[300:301])
    blocks = list(opened.blocks(size=64))
    assert [len(block.ids) for block in blocks] == [63, 64, 64, 9]
    ids = [id for block in blocks for id in block.ids]
    assert ids == [*IDS[:2], *IDS[3:200], "new"]
    positions = np.concatenate([block.positions for block in blocks])
    assert opened.ids_at(positions) == ids and 2 not in positions
    if opened.lossless or opened._keeps_vectors:
        assert np.array_equal(np.concatenate([block.vectors for block in blocks])[-1], VECTORS[300])
        assert np.array_equal(opened.vectors_at([5, 0]), VECTORS[[5, 0]])
    with pytest.raises(ConfigError, match="no position -1; the positions are 0 to 200"):
        opened.vectors_at([3, -1])
    with pytest.raises(ConfigError, match="no position 201"):
        opened.vectors_at([201])


# Documents.


def test_documents_of_other_ids_are_refused_and_nothing_changes(opened):
    for records, message in [
        (documents([201, 200]), "'doc 200' meets document 'doc 201'"),
        (documents([200]), "1 documents for 2 ids"),
        ([{"title": "x"}, {"id": "doc 201"}], "'doc 200' meets document None"),
        ([Document("doc 200", "", "", {"x": {1: object()}}), Document("doc 201", "", "")], None),
    ]:
        if message is None:
            opened.add(IDS[200:202], VECTORS[200:202], documents=records)
            continue
        with pytest.raises(DataError, match=message):
            opened.add(IDS[200:202], VECTORS[200:202], documents=records)
        assert len(opened) == 200 and len(opened.documents) == 200
    assert opened.document("doc 201")["id"] == "doc 201"


def test_documents_may_come_late_and_stay_away(tmp_path):
    index = ExactIndex(8)
    index.add(["plain"], VECTORS[:1])
    assert index.documents is None and index.document("plain") is None and index.fields is None
    index.add(["told"], VECTORS[1:2], documents=[{"id": "told", "text": "hello", "metadata": {"year": 1}}])
    index.add(["silent"], VECTORS[2:3])
    for again in (index, None):
        if again is None:
            index.save(tmp_path / "index")
            again = open_index(tmp_path / "index")
        assert again.document("plain") is None and again.document("silent") is None
        assert again.document("told")["text"] == "hello"
        assert again.search(QUERIES[:1], 3, "year == 1")[0][0][0] == "told" and again.fields.names == ["year"]


# Merging.


def test_a_merge_adds_all_of_another_index(opened, tmp_path):
    other = ExactIndex(8)
    other.model = dict(opened.model)
    other.add(IDS[150:300], VECTORS[150:300], documents=documents(range(150, 300)))
    other.remove(["doc 299"])
    with pytest.raises(DataError, match="'doc 150' is in both indexes; nothing was merged"):
        opened.merge(other)
    assert len(opened) == 200
    assert opened.merge(other, replace=True) == 149
    assert list(opened.ids) == IDS[:299] and opened.document("doc 290")["metadata"] == {"year": 290}
    opened.commit()
    assert sorted(open_index(tmp_path / "index").ids) == sorted(IDS[:299])


def test_an_empty_index_takes_over_the_model(opened):
    fresh = ExactIndex(8)
    if not (opened.lossless or opened._keeps_vectors):
        with pytest.raises(DataError, match="compressed codes without the vectors"):
            fresh.merge(opened)
        return
    assert fresh.merge(opened) == 200 and fresh.model == opened.model
    assert np.array_equal(fresh.vectors_at(range(200)), VECTORS[:200]) and fresh.document("doc 7")["title"] == "title 7"


def test_a_merge_of_what_does_not_belong_together_is_refused(opened):
    # user-reports C.70
    with pytest.raises(IndexMismatchError, match="dimension: 8 here, 4"):
        opened.merge(ExactIndex(4))
    other = ExactIndex(8)
    other.model = {"fingerprint": "bad"}
    with pytest.raises(IndexMismatchError, match="model fingerprint: 'f00' here, 'bad'"):
        opened.merge(other)
    other.model, other.frequency_prior = dict(opened.model), {"split": "train"}
    with pytest.raises(IndexMismatchError, match="frequency prior"):
        opened.merge(other)
    with pytest.raises(IndexMismatchError, match="metric: 'ip' here, 'l2'"):
        opened.merge(FaissIndex(8, metric="l2"))
    with pytest.raises(ConfigError, match="with itself"):
        opened.merge(opened)
    assert len(opened) == 200


def test_a_bad_vector_or_a_wrong_dimension_changes_nothing(opened, tmp_path):
    # user-reports C.69, J
    bad = VECTORS[200:202].copy()
    bad[1, 3] = np.nan
    with pytest.raises(NonFiniteError, match="'doc 201'"):
        opened.add(IDS[200:202], bad, documents=documents([200, 201]))
    with pytest.raises(IndexMismatchError, match="8.*f00|f00.*8"):
        opened.add(IDS[200:201], bad[:1, :4])
    assert len(opened) == 200 and opened.commit() == 1


# Filters.


def brute_force(vectors, ids, query, k):
    order = np.argsort(-(vectors @ query), kind="stable")[:k]
    return [ids[row] for row in order.tolist()]


@pytest.mark.parametrize("few", [0, 1 << 20])
def test_a_filter_leaves_k_of_what_passes(opened, few, monkeypatch):
    # Both ways of searching under a filter: in the kind's own way, and one by one where few are left.
    monkeypatch.setattr(searching, "FEW", few)
    monkeypatch.setattr(searching, "FEW_SHARE", 0)
    opened.remove(["doc 5"])
    opened.add(IDS[200:260], VECTORS[200:260], documents=documents(range(200, 260)))
    opened.settings = replace(opened.settings, nprobe=1, fetch=1.0)
    for chosen, rows in [
        (None, [row for row in range(260) if row != 5]),
        ("year >= 190", range(190, 260)),
        ("year == 7", [7]),
        ("year == 5", []),
        ({"doc 3", "doc 5", "doc 204", "unknown"}, [3, 204]),
        (set(), []),
        ("not (year >= 3)", [0, 1, 2]),
    ]:
        rows = np.array(list(rows), int)
        found = opened.search(QUERIES, 10, chosen)
        for query, result in zip(QUERIES, found, strict=True):
            ids = [id for id, _ in result]
            assert len(ids) == len(set(ids)) == min(10, len(rows)) and set(ids) <= {IDS[row] for row in rows}
            exact = opened._only_vectors or opened.spec == "flat"
            if exact or (few and len(rows) < 259 and (opened.lossless or opened._keeps_vectors)):
                assert ids == brute_force(VECTORS[rows], [IDS[row] for row in rows], query, 10)
                assert np.allclose([score for _, score in result], np.sort(VECTORS[rows] @ query)[::-1][:10], atol=1e-5)


def test_an_approximate_search_that_finds_too_few_is_finished_exactly(opened):
    opened.settings = replace(opened.settings, nprobe=1, fetch=1.0)
    for k in (150, 199, 200, 201):
        for result in opened.search(QUERIES, k):
            assert len(result) == len({id for id, _ in result}) == min(k, 200)
            assert all(first >= second for (_, first), (_, second) in zip(result, result[1:], strict=False))


def test_a_scan_in_slices_is_the_scan_in_one(opened, monkeypatch):
    allowed = np.arange(200) % 2 == 0
    whole = searching.scan_exactly(opened, QUERIES, 7, allowed)
    monkeypatch.setattr(searching, "_SLICE", 13)
    assert all(
        np.array_equal(a, b) for a, b in zip(whole, searching.scan_exactly(opened, QUERIES, 7, allowed), strict=True)
    )


def test_a_filter_that_is_none_is_a_sentence(opened):
    with pytest.raises(ConfigError, match="'yaer'.*'year'"):
        opened.search(QUERIES, 3, "yaer > 3")
    with pytest.raises(ConfigError):
        opened.search(QUERIES, 3, 17)
    with pytest.raises(ConfigError, match="mask has shape"):
        opened.search(QUERIES, 3, np.ones(3, bool))

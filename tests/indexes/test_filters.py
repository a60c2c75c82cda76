"""Filters: the positions they allow, compared with plain Python over dictionaries; and what they refuse."""

import operator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortlist.data.documents import Document
from shortlist.errors import ConfigError, DataError
from shortlist.indexes.documents import DocumentStore, DocumentWriter
from shortlist.indexes.expressions import parse_filter
from shortlist.indexes.filters import AllOf, Comparison, Filter, as_filter, field, ids, positions
from shortlist.indexes.ids import IdTable, IdWriter


class FakeIndex:
    """What a filter looks at: a table of ids and the columns."""

    def __init__(self, table, store):
        self._ids, self._store = table, store

    @property
    def fields(self):
        return self._store.fields if self._store is not None else None


def fake_index(root, parts, tail=()):
    """An index of segments and of documents in memory; each part is a list of dictionaries of fields, ids d0, d1 …"""
    directories, number = [], 0
    for part in parts:
        directory = root / f"segment-{len(directories)}"
        directory.mkdir(parents=True)
        ids, documents = IdWriter(directory), DocumentWriter(directory)
        for fields in part:
            ids.append([f"d{number}"])
            documents.append([Document(f"d{number}", "", "text", fields)])
            number += 1
        ids.close()
        documents.close()
        directories.append(directory)
    index = FakeIndex(IdTable.open(directories), DocumentStore(directories))
    for fields in tail:
        index._ids.append([f"d{number}"])
        index._store.append([Document(f"d{number}", "", "text", fields)])
        number += 1
    return index


ROWS = [
    {"year": 2010, "lang": "en", "tags": ["law", "tax"], "draft": True, "score": 0.5},
    {"year": 2011, "lang": "de", "tags": "law", "draft": False, "day": "2024-02-29"},
    {},
    {"year": None, "lang": "ü", "tags": [], "score": 2, "day": "2023-12-31"},
    {"year": 1999, "lang": "en", "draft": False, "score": float("nan")},
]


@pytest.fixture
def index(tmp_path):
    return fake_index(tmp_path, [ROWS[:2], ROWS[2:4]], ROWS[4:])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("year >= 2010", [0, 1]),
        ("2010 <= year", [0, 1]),
        ("2000 <= year < 2011", [0]),
        ("2000 < year <= 2011 and lang == 'de'", [1]),
        ("year == 2010.0", [0]),
        ("year > 2009.5", [0, 1]),
        ("year < 2010.5", [0, 4]),
        ("year <= -1e400", []),
        ("year < 1e400", [0, 1, 4]),
        ("year > 99999999999999999999", []),
        ("year < 99999999999999999999", [0, 1, 4]),
        ("year == 99999999999999999999", []),
        ("year == 2010.5", []),
        ("year != 2010.5", [0, 1, 4]),
        ("year != 2010", [1, 4]),
        ("not year == 2010", [1, 2, 3, 4]),
        ("year in [2010, 1999.0, 5]", [0, 4]),
        ("year not in (2010,)", [1, 4]),
        ("year in []", []),
        ("year not in []", [0, 1, 4]),
        ("year is None", [2, 3]),
        ("year is not None", [0, 1, 4]),
        ("None is not year", [0, 1, 4]),
        ("lang == 'en'", [0, 4]),
        ("lang > 'en'", [3]),
        ("lang in {'en', 'ü'}", [0, 3, 4]),
        ("day >= '2024-01-01'", [1]),
        ("draft", [0]),
        ("not draft", [1, 2, 3, 4]),
        ("draft == False", [1, 4]),
        ("False == draft", [1, 4]),
        ("score >= 1", [3]),
        ("score < 1", [0]),
        ("not score < 1", [1, 2, 3, 4]),
        ("score is None", [1, 2, 4]),
        ("'law' in tags", [0, 1]),
        ("'law' not in tags", [3]),
        ("not 'law' in tags", [2, 3, 4]),
        ("tags == 'tax'", [0]),
        ("tags in ['tax', 'x', 'law']", [0, 1]),
        ("tags != 'tax'", [1, 3]),
        ("id == 'd3'", [3]),
        ("id != 'd3'", [0, 1, 2, 4]),
        ("id in ['d4', 'x', 'd0']", [0, 4]),
        ("id not in ['d4', 'x', 'd0']", [1, 2, 3]),
        ("'d1' <= id <= 'd3'", [1, 2, 3]),
        ("id is None", []),
        ("field('year') == 1999 or (draft and lang == 'en')", [0, 4]),
        ("year > 2000 and lang == 'en' or lang == 'ü'", [0, 3]),
        ("year > 2000\n  and lang == 'de'", [1]),
    ],
)
def test_expressions(index, expression, expected):
    assert np.flatnonzero(as_filter(expression).mask(index)).tolist() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ((field("year") >= 2010) & (field("lang") == "de"), [1]),
        ((field("year") < 2000) | ~field("year").known(), [2, 3, 4]),
        (field("lang").isin(["ü", "de"]), [1, 3]),
        (~(field("draft") != True), [0, 2, 3]),  # noqa: E712
        ((field("year") > np.int64(2010)) & (field("year") <= np.float64(2011.0)), [1]),
        (field("year").isin(np.array([2010, 1999])), [0, 4]),
        (ids(["d1", "d9"]) | positions(3, 5), [1, 3, 4]),
        (ids("d1"), [1]),
        (positions(2, 99), [2, 3, 4]),
        ({"d2", "d0"}, [0, 2]),
        (["d2", "absent"], [2]),
        (set(), []),
        (("d4",), [4]),
        ({"d0": 1}.keys(), [0]),
    ],
)
def test_filters_made_in_python_and_sets_of_ids(index, chosen, expected):
    assert np.flatnonzero(as_filter(chosen).mask(index)).tolist() == expected


def test_no_filter_is_none():
    assert as_filter(None) is None


# Against plain Python.

fields_of = st.fixed_dictionaries(
    {},
    optional={
        "int": st.one_of(st.integers(-3, 3), st.sampled_from([2**53 + 1, -(2**63), 2**63 - 1])),
        "float": st.sampled_from([-1.5, 0.0, 0.5, 1.0, 3.0, 2.0**53, 2.0**64, 1e300, float("nan"), float("inf")]),
        "number": st.one_of(st.integers(-3, 3), st.sampled_from([0.5, -1.5])),
        "text": st.sampled_from(["", "a", "b", "ab", "ü", "𝔘", "\ue000"]),
        "bool": st.booleans(),
        "list": st.one_of(st.lists(st.sampled_from(["a", "b", "c"]), max_size=3), st.just("a")),
        "some": st.one_of(st.none(), st.just("a")),
    },
)
numbers = st.one_of(
    st.integers(-4, 4),
    st.sampled_from([0.5, -1.5, 2.0, 1e300, float("inf"), 2**53, 2**53 + 1, 2**64 - 1, 2**64, -(2**70), 10**400]),
)
texts = st.sampled_from(["", "a", "b", "ab", "ü", "𝔘", "x"])
orders = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@st.composite
def comparisons(draw):
    name, values = draw(
        st.sampled_from([
            ("int", numbers), ("float", numbers), ("number", numbers), ("text", texts), ("bool", st.booleans()),
            ("list", texts), ("some", texts), ("id", st.sampled_from(["d0", "d2", "d5", "x"])),
        ])
    )  # fmt: skip
    ops = ["==", "!=", "in", "not in"] + ([] if name in ("bool", "list") else list(orders))
    op = draw(st.sampled_from(ops))
    return Comparison(name, op, tuple(draw(st.lists(values, max_size=3))) if "in" in op else draw(values))


filters = st.recursive(
    st.one_of(
        comparisons(),
        st.sampled_from(["int", "list", "some"]).map(lambda name: field(name).known()),
        st.sets(st.sampled_from(["d0", "d1", "d4", "x"])).map(ids),
        st.tuples(st.integers(0, 3), st.integers(3, 9)).map(lambda pair: positions(*pair)),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda one: ~one),
    ),
    max_leaves=6,
)


def holds(chosen, position, fields):
    """Whether a document passes, by Python's own operators."""
    kind = type(chosen).__name__
    if kind == "Ids":
        return f"d{position}" in chosen.wanted
    if kind == "Positions":
        return chosen.start <= position < chosen.stop
    if kind == "AllOf":
        return all(holds(part, position, fields) for part in chosen.parts)
    if kind == "AnyOf":
        return any(holds(part, position, fields) for part in chosen.parts)
    if kind == "Negation":
        return not holds(chosen.part, position, fields)
    value = f"d{position}" if chosen.name == "id" else fields.get(chosen.name)
    missing = value is None or value != value
    if kind == "Known":
        return not missing
    if missing:
        return False
    wanted = list(chosen.value) if "in" in chosen.op else [chosen.value]
    if chosen.op in orders:
        return orders[chosen.op](value, wanted[0])
    held = value if isinstance(value, list) else [value]
    return any(one in wanted for one in held) != (chosen.op in ("!=", "not in"))


EVERY = {"int": 1, "float": 0.5, "number": 0.5, "text": "a", "bool": True, "list": ["a"], "some": "a"}


@settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(rows=st.lists(fields_of, max_size=9), chosen=st.lists(filters, min_size=1, max_size=4), data=st.data())
def test_masks_agree_with_plain_python(tmp_path_factory, rows, chosen, data):
    # Every field is somewhere, in one segment only if need be.
    rows = [*rows, EVERY]
    cuts = sorted(data.draw(st.integers(0, len(rows))) for _ in range(3))
    parts = [rows[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    index = fake_index(tmp_path_factory.mktemp("index"), parts[:3], parts[3])
    for one in chosen:
        expected = [holds(one, position, fields) for position, fields in enumerate(rows)]
        assert one.mask(index).tolist() == expected, str(one)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(comparisons(), comparisons(), st.booleans())
def test_a_filter_reads_as_it_is_written(one, other, negate):
    joined = one | (~other if negate else other)
    if "inf" not in str(joined):
        assert parse_filter(str(joined)) == joined


# The cache.


def test_masks_are_kept_until_the_index_changes(index, monkeypatch):
    calls = []
    evaluate = Comparison._evaluate
    monkeypatch.setattr(Comparison, "_evaluate", lambda self, index: calls.append(self) or evaluate(self, index))
    first = as_filter("year >= 2010").mask(index)
    assert as_filter("year  >=  2010").mask(index) is first and len(calls) == 1
    with pytest.raises(ValueError, match="read-only"):
        first[0] = False
    index._ids.append(["d5"])
    index._store.append([Document("d5", "", "", {"year": 2020})])
    assert as_filter("year >= 2010").mask(index).tolist() == [True, True, False, False, False, True]
    index._ids.remove(np.array([0]))
    as_filter("year >= 2010").mask(index)
    assert len(calls) == 3


def test_equal_numbers_of_other_types_are_other_filters(index):
    assert as_filter("draft == True").mask(index).any()
    with pytest.raises(ConfigError, match="'draft' is a bool; compare it with True or False, not with 1"):
        as_filter("draft == 1").mask(index)
    with pytest.raises(ConfigError, match="'year' is an int; compare it with a number, not with True"):
        as_filter("year == True").mask(index)


def test_only_a_few_masks_are_kept(index):
    from shortlist.indexes.filters import _CACHED_MASKS, _masks

    for number in range(3 * _CACHED_MASKS):
        as_filter(f"year == {number}").mask(index)
    assert len(_masks(index._ids)._masks) == _CACHED_MASKS


# What is refused.


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("yaer >= 2010", r"there is no field 'yaer'; did you mean 'year'\? The fields are id, year, lang, tags"),
        ("zzz == 1", r"there is no field 'zzz'\. The fields are id, year"),
        ("year >= '2010'", "the field 'year' is an int; compare it with a number, not with '2010'"),
        ("year in [2010, '2011']", "the field 'year' is an int; .* not with '2011'"),
        ("lang == 3", "the field 'lang' is a string; compare it with a string, not with 3"),
        ("lang", "the field 'lang' is a string; compare it with a string, not with True"),
        ("draft > False", "the field 'draft' is a bool, which has no order"),
        ("tags >= 'a'", "the field 'tags' is a list of string, which has no order"),
        ("id == 3", "the field 'id' is a string; compare it with a string, not with 3"),
        ("2010 in tags", "the field 'tags' is a list of string; compare it with a string, not with 2010"),
    ],
)
def test_comparisons_that_do_not_fit_the_fields_are_refused(index, expression, sentence):
    with pytest.raises(ConfigError, match=sentence):
        as_filter(expression).mask(index)


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("", "the filter is empty"),
        ("year = 2010", r"'year = 2010' is not understood \(character 1\); equality is written =="),
        ("year >= 2010 and", r"is not understood \(at its end\)"),
        ("year >= 2010 AND lang == 'en'", "write and, or, not, in and is in lower case"),
        ("year > 1 && year < 3", "write and, or, not, in and is in lower case"),
        ("class == 3", r"a field of that name is written field\('class'\)"),
        ("year >= 2010 & lang == 'en'", "character 9: '2010 & lang' is a calculation"),
        ("(year > 1) & (year < 3)", "joins with & or |"),
        ("~draft", "negates with ~; write not"),
        ("__import__('os').system('true') == 1", "character 1: .* is a call"),
        ("(lambda: 1)() == year", "is a call"),
        ("[x for x in year]", "is a ListComp, which a filter cannot hold"),
        ("(x := 3) == 3", "expected a field, a number"),
        ("f'{year}' == lang", "is an f-string"),
        ("geo.lat > 3", r"character 1: 'geo.lat' is a part of something \(.lat; a dotted name is written field"),
        ("tags[0] == 'a'", "is a part of something"),
        ("year + 1 == 2010", "'year \\+ 1' is a calculation"),
        ("year == 2000 + 10", "character 9: '2000 \\+ 10' is a calculation"),
        ("year == lang", "character 9: 'lang' would be another field"),
        ("lang == en", "would be another field; compare 'lang' with a value, a text in quotes"),
        ("lang in [en]", "character 10: 'en' stands where a value should"),
        ("2010", "is a value that is compared with no field"),
        ("3 == 3", "is compared with no field"),
        ("'a' in 'abc'", "is compared with no field"),
        ("lang in 'en'", "should be a list of values"),
        ("year == [2010]", "is a list; test it with in"),
        ("year is 2010", "takes None alone"),
        ("year == None", "write `year is None` or `year is not None`"),
        ("draft == true", "'true' is written True"),
        ("year == b'x'", "is of the type bytes"),
        ("year == 3j", "is of the type complex"),
        ("field(year) == 3", r"should name one field in quotes"),
        ("field('a', 'b') == 3", r"should name one field in quotes"),
        ("lang == 'ü' and ö.ö == 1", "character 17: 'ö.ö'"),
        ("year > 1\nand year + 1 == 2", r"line 2, character 5: 'year \+ 1'"),
        ("not " * 5000 + "draft", "nested too deeply"),
        ("(" * 500 + "draft" + ")" * 500, "nested too deeply|not understood"),
        ("year == 1\0", "holds a character that is none|not understood"),
        ("x" * 2_000_000, "has 2,000,000 characters"),
        ("\ud800 == 1", "not understood|holds a character that is none"),
    ],
)
def test_expressions_that_are_no_filter_are_refused_with_the_place(expression, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_filter(expression)
    assert len(str(caught.value)) < 800


def test_nothing_in_an_expression_is_called(tmp_path):
    target = tmp_path / "file"
    with pytest.raises(ConfigError):
        parse_filter(f"open({str(target)!r}, 'w') == 1")
    assert not target.exists()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: (field("a") == 1) and (field("b") == 2), "join filters with & | ~"),
        (lambda: 1 <= field("a") < 3, "in place of a chained comparison"),
        (lambda: not field("a"), r"field\('a'\) is a field, not a condition"),
        (lambda: (field("a") == 1) & 2, "joins two filters"),
        (lambda: field("a").isin("abc"), "takes a list of values, not 'abc'"),
        (lambda: field("a") == float("nan"), "NaN equals nothing"),
        (lambda: field("a") == None, r"None is no value .*known\(\)"),  # noqa: E711
        (lambda: field("a") == object(), "compare with a number, a string"),
        (lambda: field(""), "the name of a field is a non-empty string"),
        (lambda: as_filter(3), "filter is 3; expected an expression"),
        (lambda: as_filter({"year": 3}), "expected an expression"),
        (lambda: positions(3, 1), "expected 0 ≤ start ≤ stop"),
    ],
)
def test_slips_in_python_are_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_an_id_is_a_string():
    with pytest.raises(DataError, match="document id 1.5"):
        as_filter([1.5])
    assert as_filter([1, "b"]) == ids({"1", "b"})


@pytest.mark.parametrize("chosen", ["id == '\\ud800'", "lang in ['en', '\\ud800']"])
def test_half_a_surrogate_pair_equals_nothing_and_is_refused(chosen):
    with pytest.raises((ConfigError, DataError), match="lone surrogate"):
        as_filter(chosen)


def test_an_index_without_fields_can_be_filtered_by_id_alone(tmp_path):
    index = fake_index(tmp_path, [[{}, {}]])
    assert as_filter("id == 'd1'").mask(index).tolist() == [False, True]
    with pytest.raises(ConfigError, match="the documents of this index have no fields, only ids"):
        as_filter("year == 1").mask(index)
    index._store = None
    with pytest.raises(ConfigError, match="no fields, only ids"):
        as_filter("year is None").mask(index)


def test_positions_without_a_stored_document_have_no_fields(index):
    # Vectors may be added without their documents.
    index._ids.append(["d5", "d6"])
    index._store.skip(2)
    assert as_filter("year >= 2010").mask(index).tolist() == [True, True, False, False, False, False, False]
    assert as_filter("not draft").mask(index)[5:].all()


def test_the_fields_of_a_filter_are_known():
    chosen = as_filter("year > 1 and not (draft or 'x' in tags) and id in ['a']")
    assert isinstance(chosen, AllOf) and chosen.names() == {"year", "draft", "tags", "id"}
    assert isinstance(chosen, Filter) and positions(0, 1).names() == ids("a").names() == frozenset()

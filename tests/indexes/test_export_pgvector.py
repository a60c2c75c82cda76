"""PostgreSQL with pgvector: the COPY file read back by the rules of COPY, and the commands on a real server if given.

`SHORTLIST_TEST_POSTGRES` may hold the connection URL of a database with pgvector that may be written to.
"""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from export_samples import DIM, check_search, expected, guide, queries, sample, shown

from shortlist import ExactIndex
from shortlist.data import Document
from shortlist.errors import DataError
from shortlist.indexes.export import export_index

# PostgreSQL manual, COPY, "Text Format".
BACKSLASH = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def read_copy(file):
    """The rows of a COPY file in text format; None for NULL."""
    content = file.read_bytes()
    assert content.endswith(b"\n") and b"\r" not in content and b"\0" not in content
    for line in content[:-1].decode("utf-8").split("\n"):
        assert line != "\\."  # the end of the data
        yield [None if value == "\\N" else unescaped(value) for value in line.split("\t")]


def unescaped(value):
    out, escaped = [], False
    for character in value:
        if escaped:
            assert character in BACKSLASH or character == "\\", f"\\{character} is an octal, hex or unknown escape"
            out.append(BACKSLASH.get(character, character))
        elif character != "\\":
            out.append(character)
        escaped = character == "\\" and not escaped
    assert not escaped
    return "".join(out)


def test_the_copy_file_holds_every_row_exactly(tmp_path):
    index = sample()
    export_index(index, "pgvector", tmp_path / "out")
    rows = list(read_copy(tmp_path / "out/documents.copy"))
    assert {row[0]: (row[2], row[3], json.loads(row[4])) for row in rows} == expected(index)
    assert [row[0] for row in rows] == list(index.ids)
    vectors = np.array([json.loads(row[1]) for row in rows], np.float64).astype(np.float32)
    np.testing.assert_array_equal(vectors, np.vstack([block.vectors for block in index.blocks()]))


def test_the_schema_and_the_load_name_the_columns_of_the_file(tmp_path):
    export_index(sample(), "pgvector", tmp_path / "out", name="my_documents")
    schema, load = ((tmp_path / "out" / name).read_text("utf-8") for name in ("schema.sql", "load.sql"))
    assert f"vector vector({DIM}) NOT NULL" in schema and "CREATE TABLE my_documents" in schema
    columns = re.findall(r"^    (\w+) \w+", schema, re.MULTILINE)
    copied = re.search(r"\\copy my_documents \((.*?)\) FROM 'documents.copy'", load)
    assert copied and copied[1].split(", ") == columns == ["id", "vector", "title", "text", "fields"]
    export_index(sample(documents=False), "pgvector", tmp_path / "vectors")
    assert {len(row) for row in read_copy(tmp_path / "vectors/documents.copy")} == {2}
    assert "(id, vector) FROM" in (tmp_path / "vectors/load.sql").read_text("utf-8")


def test_documents_without_text_are_null(tmp_path):
    index = ExactIndex(DIM)
    index.add(["with"], queries(1), documents=[Document("with", "", "text")])
    index.add(["without"], queries(2)[1:])
    export_index(index, "pgvector", tmp_path / "out")
    with_text, without = read_copy(tmp_path / "out/documents.copy")
    assert with_text[2:] == ["", "text", "{}"] and without[2:] == [None, None, None]


def test_nul_characters_are_replaced_in_texts_and_refused_in_ids(tmp_path):
    index = ExactIndex(2)
    documents = [Document("a", "t\0", "x\0y", {"k\0": ["v\0", 1]}), Document("b", "", "\\u0000 as text")]
    index.add(["a", "b"], np.eye(2), documents=documents)
    (note,) = export_index(index, "pgvector", tmp_path / "out").notes
    assert note.startswith("1 documents hold NUL") and "'a'" in note
    first, second = read_copy(tmp_path / "out/documents.copy")
    assert first[2:4] == ["t\ufffd", "x\ufffdy"] and json.loads(first[4]) == {"k\ufffd": ["v\ufffd", 1]}
    assert second[3] == "\\u0000 as text"
    index.add(["n\0"], [[1.0, 1.0]])
    with pytest.raises(DataError, match=r"id 'n\\x00' holds a NUL"):
        export_index(index, "pgvector", tmp_path / "ids")


@pytest.mark.parametrize(
    ("dim", "index"), [(2_000, "hnsw (vector vector_ip_ops)"), (2_001, "halfvec(2001)) halfvec_ip_ops"), (4_001, None)]
)
def test_the_guide_shows_an_index_that_takes_the_dimensions(dim, index, tmp_path):
    made = ExactIndex(dim)
    made.add(["a"], np.ones((1, dim)))
    export_index(made, "pgvector", tmp_path / "out")
    assert (index or "HNSW takes up to 4,000 dimensions.") in guide(tmp_path / "out")
    assert ("CREATE INDEX" in guide(tmp_path / "out")) == (index is not None)


def test_the_minus_of_the_score_is_outside_the_square(tmp_path):
    # in SQL a sign binds more tightly than ^: -(x) ^ 2 is positive
    export_index(sample(metric="l2"), "pgvector", tmp_path / "out")
    assert "-((vector <-> :'vector') ^ 2) AS score" in guide(tmp_path / "out")


@pytest.mark.skipif("SHORTLIST_TEST_POSTGRES" not in os.environ or not shutil.which("psql"), reason="needs a server")
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_server_loads_the_export_and_searches_agree(metric, tmp_path):
    index, name = sample(metric=metric), f"shortlist_test_{metric}"
    out = tmp_path / "out"
    export_index(index, "pgvector", out, name=name)
    url = os.environ["SHORTLIST_TEST_POSTGRES"]

    def psql(script, *arguments):
        command = ["psql", "-X", url, "-v", "ON_ERROR_STOP=1", "-At", *arguments]
        return subprocess.run(command, input=script, capture_output=True, text=True, check=True, cwd=out).stdout

    subprocess.run(["bash", "-c", shown(out, "bash")], check=True, cwd=out, env={**os.environ, "DATABASE_URL": url})
    try:
        rows = json.loads(psql(f"SELECT json_agg(json_build_array(id, title, text, fields)) FROM {name};"))
        assert {id: (title, text, fields) for id, title, text, fields in rows} == expected(index)
        search = shown(out, "sql", "## Query").split("\n\n")[0].split(";")[0]

        def query(vector, k):
            wrapped = (
                f"SELECT json_agg(json_build_array(id, score)) FROM ({search.replace('LIMIT 10', f'LIMIT {k}')}) q;"
            )
            values = f"[{','.join(map(str, vector.tolist()))}]"
            return [tuple(pair) for pair in json.loads(psql(wrapped, "-v", f"vector={values}"))]

        check_search(query, index)
        psql("\n".join(re.findall(r"CREATE INDEX ON \w+ USING hnsw[^;]*;", shown(out, "sql"))))
    finally:
        psql(f"DROP TABLE {name};")

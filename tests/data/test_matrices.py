import numpy as np
import pytest
import scipy.sparse

from shortlist.data.matrices import (
    matrix_shape,
    read_combined,
    read_label_matrix,
    read_sparse_text,
    write_label_matrix,
)
from shortlist.errors import DataError, MissingInputError

DENSE = np.array([[1, 0, 0.5], [0, 0, 0], [0, 2, 1]], dtype=np.float32)
SPLIT = "3 3\n0:1.0 2:0.5\n\n1:2 2:1.0\n"


def save(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_split_text_npz_and_crlf_read_alike(tmp_path):
    npz = tmp_path / "Y.trn.npz"
    write_label_matrix(npz, scipy.sparse.csr_matrix(DENSE))
    for path in (
        npz,
        save(tmp_path / "a.txt", SPLIT),
        save(tmp_path / "b.txt", "\ufeff" + SPLIT.replace("\n", "\r\n")),
        save(tmp_path / "c.txt", SPLIT.rstrip("\n")),
    ):
        assert matrix_shape(path) == (3, 3)
        matrix = read_label_matrix(path)
        assert matrix.dtype == np.float32 and matrix.has_sorted_indices
        np.testing.assert_array_equal(matrix.toarray(), DENSE)


def test_combined_file_gives_features_and_labels(tmp_path):
    path = save(tmp_path / "eurlex.txt", "3 4 3\n0,2 0:0.5 3:1\n 1:2.0\n1 2:1\n")
    features, labels = read_combined(path)
    np.testing.assert_array_equal(features.toarray(), [[0.5, 0, 0, 1], [0, 2, 0, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(labels.toarray(), [[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(read_label_matrix(path).toarray(), labels.toarray())
    assert matrix_shape(path) == (3, 3)


@pytest.mark.parametrize(  # user-reports A.29: never an enormous bogus column count
    "text, message",
    [
        ("0:1.0 2:0.5\n1:1\n", r"line 1: expected a header.*found '0:1.0 2:0.5'.*write '2 3' as the first line"),
        ("3\n0:1\n", "line 1: expected a header"),
        ("3 -3\n0:1\n", "line 1: expected a header"),
        ("", "line 1: expected a header"),
        ("4 3\n0:1\n1:1\n", "says 4 rows and 3 columns, but 2 rows follow"),
        ("2 3\n0:1\n3:1\n", "line 3: index 3, but the header says 3 columns.*from 0 to 2"),
        ("2 3\n0:1\n-1:1\n", "line 3: index -1"),
        ("2 3\n0:1\nx:1\n", "line 3: found 'x:1'"),
        ("2 3\n0:1\n1:nan\n", "line 3: found '1:nan'"),
        ("2 3\n0:1\n1 2:1\n", "line 3: found '1'; expected pairs"),
        ("2 3\n0:1\n1:2:3\n", "line 3: found '1:2:3'"),
    ],
)
def test_wrong_headers_and_pairs_name_line_and_shape(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_label_matrix(save(tmp_path / "trn_X_Y.txt", text))


def test_combined_file_checks_labels_and_features_alike(tmp_path):
    with pytest.raises(DataError, match="line 3: label 3"):
        read_combined(save(tmp_path / "a.txt", "2 4 3\n0 1:1\n0,3 1:1\n"))
    with pytest.raises(DataError, match="line 2: feature 4"):
        read_combined(save(tmp_path / "b.txt", "1 4 3\n0 4:1\n"))
    with pytest.raises(DataError, match="expected 'points features labels'"):
        read_combined(save(tmp_path / "c.txt", SPLIT))
    with pytest.raises(DataError, match="expected 'rows columns'"):
        read_sparse_text(save(tmp_path / "d.txt", "1 4 3\n0 1:1\n"))


def test_a_label_twice_in_a_row_counts_once_and_is_reported(tmp_path, caplog):
    matrix = read_label_matrix(save(tmp_path / "y.txt", "1 3\n2:1 0:1 2:1\n"))
    np.testing.assert_array_equal(matrix.toarray(), [[1, 0, 1]])
    assert "1 labels stand twice" in caplog.text


def test_pickled_npz_is_never_opened(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, data=np.array([{"a": 1}], dtype=object), format=np.array(b"csr"), shape=np.array([1, 1]),
             indices=np.array([0]), indptr=np.array([0, 1]))  # fmt: skip
    with pytest.raises(DataError, match="Python objects, which are never opened"):
        read_label_matrix(path)


@pytest.mark.parametrize("content", [b"PK\x03\x04 not a zip", None])
def test_damaged_and_foreign_npz_are_refused(tmp_path, content):
    path = tmp_path / "Y.trn.npz"
    if content is None:
        np.savez(path, numbers=np.zeros(3))
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match="not a sparse matrix"):
        read_label_matrix(path)
    with pytest.raises(DataError, match="not a sparse matrix"):
        matrix_shape(path)


def test_npz_with_indices_outside_its_shape_or_nan_is_refused(tmp_path):
    path = tmp_path / "Y.npz"
    np.savez(path, data=np.ones(1), indices=np.array([7]), indptr=np.array([0, 1]), format=np.array(b"csr"),
             shape=np.array([1, 3]))  # fmt: skip
    with pytest.raises(DataError):
        read_label_matrix(path)
    write_label_matrix(path, scipy.sparse.csr_matrix([[np.nan, 1.0]]))
    with pytest.raises(DataError, match="NaN"):
        read_label_matrix(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(MissingInputError, match="Y.tst.npz does not exist"):
        read_label_matrix(tmp_path / "Y.tst.npz")


def test_equal_matrices_give_equal_bytes(tmp_path):
    for name in ("a.npz", "b.npz"):
        write_label_matrix(tmp_path / name, scipy.sparse.csr_matrix(DENSE))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_many_rows_cross_the_chunk_boundary(tmp_path):
    generator = np.random.default_rng(0)
    matrix = scipy.sparse.random(20_050, 40, density=0.02, format="csr", random_state=generator, dtype=np.float32)
    lines = [f"{matrix.shape[0]} {matrix.shape[1]}"]
    for row in range(matrix.shape[0]):
        part = slice(matrix.indptr[row], matrix.indptr[row + 1])
        pairs = zip(matrix.indices[part], matrix.data[part], strict=True)
        lines.append(" ".join(f"{i}:{float(v)!r}" for i, v in pairs))
    read = read_label_matrix(save(tmp_path / "big.txt", "\n".join(lines) + "\n"))
    assert (read != matrix).nnz == 0
    lines[20_040] = "1:1 99:1"
    with pytest.raises(DataError, match="line 20041: index 99"):
        read_label_matrix(save(tmp_path / "bad.txt", "\n".join(lines) + "\n"))

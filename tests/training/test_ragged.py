"""Flat lists and draws: the same numbers give the same draw, without replacement, in proportion to the weights."""

import numpy as np

from shortlist.training.ragged import Ragged, draw, hashed, ranges, unite


def test_lists_come_back_from_the_flat_arrays():
    lists = Ragged.from_lists([[3, 1], [], [2]], [[0.5, 1.0], [], [4.0]])
    assert len(lists) == 3 and lists.lengths.tolist() == [2, 0, 1]
    assert [lists.row(number).tolist() for number in range(3)] == [[3, 1], [], [2]]
    assert lists.weights(2).tolist() == [4.0]
    positions, owners = lists.entries(np.array([2, 0, 1, 2]))
    assert lists.items[positions].tolist() == [2, 3, 1, 2] and owners.tolist() == [0, 1, 1, 3]
    assert Ragged.from_lists([[1], [2]]).values_at(np.array([0, 1])).tolist() == [1, 1]
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 1])).tolist() == [5, 6, 7]


def test_uniting_sorts_drops_copies_and_keeps_the_largest_value():
    found = unite(np.array([1, 0, 1, 1]), np.array([5, 2, 3, 5]), np.array([1, 1, 2, 4], np.float32), lists=3)
    assert [found.row(number).tolist() for number in range(3)] == [[2], [3, 5], []]
    assert found.weights(1).tolist() == [2, 4]
    ones = unite(np.array([0, 0]), np.array([4, 1]), np.ones(2, np.float32), lists=1)
    assert ones.row(0).tolist() == [1, 4] and ones.values is None


def test_draws_are_without_replacement_and_functions_of_their_numbers():
    owners = np.repeat([0, 1, 2], [10, 2, 5])
    random = hashed(7, owners, np.arange(17))
    kept = draw(owners, 3, random)
    assert np.bincount(owners[kept], minlength=3).tolist() == [3, 2, 3]
    assert (kept == draw(owners, 3, hashed(7, owners, np.arange(17)))).all()
    # Who else is in the batch changes nothing.
    assert (kept[12:] == draw(owners[12:] - 2, 3, random[12:])).all()
    assert draw(np.zeros(0, np.int64), 3, np.zeros(0, np.uint64)).tolist() == []
    # A smaller draw is the beginning of a larger one.
    assert (draw(owners, 2, random) <= kept).all()


def test_uniform_draws_are_uniform_and_weighted_draws_follow_their_weights():
    owners = np.repeat(np.arange(6000), 4)
    random = hashed(1, owners, np.tile(np.arange(4), 6000))
    plain = draw(owners, 2, random).reshape(-1, 4).mean(axis=0)
    assert np.allclose(plain, 0.5, atol=0.03)
    weights = np.tile(np.array([1, 2, 5, 0], np.float32), 6000)
    weighted = draw(owners, 1, random, weights).reshape(-1, 4).mean(axis=0)
    assert np.allclose(weighted, [1 / 8, 2 / 8, 5 / 8, 0], atol=0.02)
    # Two of (1, 2, 5) one after the other: the first is left out if neither draw takes it.
    both = draw(owners, 2, random, weights).reshape(-1, 4).mean(axis=0)
    assert np.isclose(1 - both[0], 2 / 8 * 5 / 6 + 5 / 8 * 2 / 3, atol=0.02) and both[3] == 0


def test_hashes_of_neighbouring_numbers_have_nothing_in_common():
    values = hashed(np.arange(10_000), 0)
    bits = (values[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.allclose(bits.mean(axis=0), 0.5, atol=0.03)
    assert len(np.unique(values)) == 10_000
    assert (hashed(1, 2) != hashed(2, 1)).all()

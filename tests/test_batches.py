"""Batches by token budget, and padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(
    st.tuples(st.integers(1, 60) | st.integers(1, 900), st.integers(1, 60) | st.integers(1, 900)),
    min_size=1,
    max_size=80,
)


def rows_of(lengths):
    return [np.full(length, 5) for length in lengths]


def random_rows(n, longest=60):
    rng = np.random.default_rng(0)
    src = rng.integers(1, longest + 1, n)
    tgt = np.clip(src + rng.integers(-5, 6, n), 1, None)
    return rows_of(src), rows_of(tgt)


def as_lists(batches):
    return [batch.tolist() for batch in batches]


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(16, 3000), st.integers(0, 5))
def test_each_pair_comes_exactly_once_and_the_budget_is_kept(lesson8, lengths, budget, seed):
    """Up to 256 tokens n * longest <= budget; beyond, a pair counts longest / 256 times more."""
    src, tgt = (rows_of(side) for side in zip(*lengths, strict=True))
    batches = lesson8.plan_batches(src, tgt, budget, seed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(max(lengths[i]) for i in batch)
        assert len(batch) == 1 or len(batch) * longest * max(256, longest) <= budget * 256
    assert as_lists(batches) == as_lists(lesson8.plan_batches(src, tgt, budget, seed))


@pytest.mark.parametrize(
    ("length", "size"), [(8, 256), (256, 8), (512, 2), (700, 1), (1000, 1)]
)  # 2048 tokens; 512 tokens count twice, 700 more than 2.7 times
def test_a_batch_is_as_large_as_its_budget_allows(lesson8, length, size):
    src, tgt = rows_of([length] * (2 * size)), rows_of([3] * (2 * size))
    for sides in ((src, tgt), (tgt, src)):  # whichever side is the longer one
        batches = lesson8.plan_batches(*sides, 2048, 1)
        assert [len(batch) for batch in batches] == [size] * 2


def test_one_long_pair_does_not_join_short_ones_over_the_budget(lesson8):
    src, tgt = rows_of([10] * 50 + [900]), rows_of([10] * 51)
    batches = as_lists(lesson8.plan_batches(src, tgt, 1000, 1))
    assert [50] in batches and sorted(map(len, batches)) == [1, 50]


def test_one_long_pair_does_not_shrink_the_batches_after_it(lesson8):
    """By target length the long pair comes first; the short ones still go 50 to a batch."""
    src, tgt = rows_of([200] + [4] * 100), rows_of([1] + [4] * 100)
    batches = lesson8.plan_batches(src, tgt, 200, 1)
    assert sorted(map(len, batches)) == [1, 50, 50]


def test_like_lengths_stand_together(lesson8):
    """Of the cells of all batches, few are padding; in batches at random it would be half."""
    src, tgt = random_rows(3000)
    batches = lesson8.plan_batches(src, tgt, 1000, 1)
    for side in (src, tgt):
        cells = sum(len(batch) * max(len(side[i]) for i in batch) for batch in batches)
        assert sum(map(len, side)) / cells > 0.85


def test_epochs_differ_and_a_seed_fixes_each(lesson8):
    src, tgt = random_rows(500)
    plans = [as_lists(lesson8.plan_batches(src, tgt, 600, (7, epoch))) for epoch in (0, 1, 0)]
    assert plans[0] == plans[2] != plans[1]
    members = [{frozenset(batch) for batch in plan} for plan in plans]
    assert members[0] != members[1]  # other neighbours, not only another order of batches


def test_batches_do_not_come_sorted_by_length(lesson8):
    src, tgt = random_rows(1000)
    batches = lesson8.plan_batches(src, tgt, 600, 3)
    longest = [max(len(tgt[i]) for i in batch) for batch in batches]
    rises = np.mean(np.diff(longest) > 0)
    assert 0.3 < rises < 0.7


def test_pad_rows_fills_up_with_pad_on_the_right(lesson8):
    padded = lesson8.pad_rows([[5, 2], np.array([5, 6, 7, 2]), [2]])
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[5, 2, 0, 0], [5, 6, 7, 2], [2, 0, 0, 0]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 60_000), min_size=1, max_size=20), min_size=1, max_size=20))
def test_pad_rows_keeps_every_row(lesson8, rows):
    padded = lesson8.pad_rows(rows)
    assert padded.shape == (len(rows), max(map(len, rows)))
    assert [[i for i in row if i != lesson8.PAD] for row in padded.tolist()] == rows

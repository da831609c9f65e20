"""buffers: what is lent serves one borrower at a time, and none too many are made."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer._cuda_graphs.engine.buffers import BufferPool, Lease


def numbered():
    """Makes another number each time it is called."""
    return itertools.count().__next__


def test_what_is_free_is_lent_again():
    pool, make = BufferPool[int](), numbered()
    first = pool.acquire("key", make)
    pool.release(first)
    assert pool.acquire("key", make).buffers == first.buffers == 0


def test_what_was_freed_first_is_lent_first():
    pool, make = BufferPool[int](), numbered()
    leases = [pool.acquire("key", make) for _ in range(3)]
    for index in (1, 0, 2):
        pool.release(leases[index])
    assert [pool.acquire("key", make).buffers for _ in range(3)] == [1, 0, 2]


def test_another_key_is_lent_something_else():
    pool, make = BufferPool[int](), numbered()
    pool.release(pool.acquire("one", make))
    assert pool.acquire("other", make).buffers == 1


def test_what_two_hold_is_free_when_both_have_released_it():
    pool, make = BufferPool[int](), numbered()
    lease = pool.acquire("key", make)
    pool.retain(lease)
    pool.release(lease)
    assert pool.free() == []
    pool.release(lease)
    assert pool.free() == [0]


def test_what_is_free_cannot_be_retained():
    pool = BufferPool[int]()
    lease = pool.acquire("key", numbered())
    pool.release(lease)
    with pytest.raises(ValueError, match="used after it was given back"):
        pool.retain(lease)


def test_what_is_free_cannot_be_released():
    pool = BufferPool[int]()
    lease = pool.acquire("key", numbered())
    pool.release(lease)
    with pytest.raises(ValueError, match="given back twice"):
        pool.release(lease)


@given(st.lists(st.tuples(st.sampled_from(["acquire", "retain", "release"]), st.integers(0, 9), st.integers(0, 2))))
def test_nothing_serves_two_borrowers_and_no_more_is_made_than_is_held_at_once(steps):
    pool, make = BufferPool[int](), numbered()
    held: list[Lease[int]] = []  # once for each holder
    most = dict.fromkeys(range(3), 0)
    made: set[int] = set()
    for action, which, key in steps:
        if action == "acquire":
            lease = pool.acquire(key, make)
            assert lease.buffers not in [other.buffers for other in held]
            held.append(lease)
            made.add(lease.buffers)
            most[key] = max(most[key], len({other.buffers for other in held if other.key == key}))
        elif held and action == "retain":
            held.append(held[which % len(held)])
            pool.retain(held[-1])
        elif held:
            pool.release(held.pop(which % len(held)))
    assert len(made) == sum(most.values())
    assert sorted(pool.free()) == sorted(made - {lease.buffers for lease in held})

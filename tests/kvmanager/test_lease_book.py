"""Deadlines of leases, on a clock that the test moves by hand."""

from __future__ import annotations

import pytest

from kvmanager.errors import LeaseExists, LeaseExpired, UnknownLease
from kvmanager.ids import TransferId
from kvmanager.lease import LeaseBook

T, U = TransferId("t"), TransferId("u")


def test_a_lease_without_a_deadline_never_expires() -> None:
    book = LeaseBook()
    book.take(T)
    assert book.expire(1e12) == []


def test_a_lease_expires_at_its_deadline_and_is_named_once() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=10.0)
    book.take(U, deadline_s=20.0)
    assert book.expire(9.999) == []
    assert book.expire(10.0) == [T]
    assert book.expire(11.0) == []
    assert book.expire(25.0) == [U]
    book.check()


def test_an_expired_lease_still_pins_until_it_is_ended() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=10.0)
    book.expire(11.0)
    assert T in book
    assert book.is_expired(T)
    assert book.end(T)
    assert T not in book
    assert not book.is_expired(T)


def test_a_renewed_lease_lives_until_its_new_deadline() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=10.0)
    book.renew(T, deadline_s=30.0)
    assert book.expire(29.0) == []
    assert book.expire(30.0) == [T]


def test_a_deadline_can_be_brought_forward() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=100.0)
    assert book.expire(50.0) == []
    book.renew(T, deadline_s=60.0)
    book.check()
    assert book.expire(60.0) == [T]


def test_an_expired_lease_cannot_be_renewed_because_its_transfer_is_being_ended() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=10.0)
    book.expire(10.0)
    with pytest.raises(LeaseExpired):
        book.renew(T, deadline_s=99.0)


def test_a_transfer_has_one_lease_and_a_stranger_none() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=10.0)
    with pytest.raises(LeaseExists):
        book.take(T, deadline_s=99.0)
    assert book.expire(10.0) == [T]
    with pytest.raises(UnknownLease):
        book.renew(U, deadline_s=1.0)
    assert not book.end(U)


def test_ending_twice_is_harmless() -> None:
    book = LeaseBook()
    book.take(T, deadline_s=10.0)
    book.end(T)
    assert not book.end(T)
    assert len(book) == 0
    assert book.expire(99.0) == []
    book.check()

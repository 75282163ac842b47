"""Replacing functions in memory: all or none, put back exactly, and what others do in between is told."""

from __future__ import annotations

import pytest

from nnscaler_integration.patching import Patch, Patches


class Owner:
    def method(self) -> str:
        return "original"

    @staticmethod
    def static() -> str:
        return "original"


def louder(original):  # type: ignore[no-untyped-def]
    return lambda *args: original(*args).upper()


def test_functions_are_replaced_and_put_back_exactly() -> None:
    before = dict(vars(Owner))
    patches = Patches()
    patches.apply([Patch(Owner, "method", louder), Patch(Owner, "static", louder)])
    assert (Owner().method(), Owner.static(), Owner().static()) == ("ORIGINAL",) * 3
    assert patches.overridden() == []
    patches.revert()
    assert dict(vars(Owner)) == before


def test_none_is_replaced_where_one_fails() -> None:
    before = dict(vars(Owner))
    with pytest.raises(KeyError):
        Patches().apply([Patch(Owner, "method", louder), Patch(Owner, "missing", louder)])
    assert dict(vars(Owner)) == before


def test_what_somebody_else_has_put_in_place_since_is_told() -> None:
    original = Owner.method
    patches = Patches()
    patches.apply([Patch(Owner, "method", louder)])
    Owner.method = lambda self: "theirs"  # type: ignore[method-assign]
    assert patches.overridden() == ["Owner.method was replaced by something else after install()"]
    with pytest.warns(RuntimeWarning, match="Owner.method was replaced"):
        patches.revert()
    assert Owner.method is original

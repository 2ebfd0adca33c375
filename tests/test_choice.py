"""Options settle to their types and refuse nonsense with field, value, legal range and a way out."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from stalefront.choice import Choice, OptionError
from stalefront.delay.reuse import Reuse


@dataclass(frozen=True)
class Inner(Choice):
    size: int


@dataclass(frozen=True)
class Outer(Choice):
    rate: float
    count: int
    flag: bool
    kind: Literal["a", "b"]
    pair: tuple[float, float]
    names: tuple[str, ...]
    inner: Inner | None
    free: dict[str, Any]


def outer(**changes: Any) -> Outer:
    values = {
        "rate": 1,
        "count": 2.0,
        "flag": True,
        "kind": "a",
        "pair": [1, 2],
        "names": ["x"],
        "inner": {"size": 3},
        "free": {"k": (1, 2)},
    }
    return Outer.from_mapping(values | changes)


def test_values_take_their_declared_types():
    got = outer()
    assert (got.rate, got.count, got.pair, got.names) == (1.0, 2, (1.0, 2.0), ("x",))
    assert type(got.rate) is float
    assert type(got.count) is int
    assert got.inner == Inner(3)
    assert got.free == {"k": [1, 2]}


def test_plain_form_comes_back_as_the_same_choice():
    got = outer(inner=None)
    assert Outer.from_mapping(got.as_dict()) == got


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rate", "fast"),
        ("rate", True),
        ("count", 1.5),
        ("count", True),
        ("flag", 1),
        ("kind", "c"),
        ("pair", [1]),
        ("pair", "ab"),
        ("names", "x"),
        ("inner", 3),
        ("free", []),
    ],
)
def test_a_wrong_type_is_an_option_error_with_field_and_value(field: str, value: Any):
    with pytest.raises(OptionError) as caught:
        outer(**{field: value})
    assert caught.value.field == field
    assert repr(value) in str(caught.value)
    assert "Legal: " in str(caught.value)


def test_unknown_and_missing_keys_are_refused():
    with pytest.raises(OptionError, match="sped"):
        outer(sped=1)
    with pytest.raises(OptionError, match="minibatches"):
        Reuse.from_mapping({"S": 2})


def test_key_is_the_override_a_user_types():
    with pytest.raises(OptionError, match=r"^delay\.S = 0 is not possible\. Legal: a whole number of at least 1\."):
        Reuse(S=0, minibatches=1)

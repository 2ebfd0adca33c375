"""Arms: what is method and what has to match, and which arm is the reference."""

import pytest

from stalefront.analysis.arms import describe_arms, families

TIS = {"choice": "token_tis", "cap": 2.0}
ICEPOP = {"choice": "icepop", "low": 0.5}


def described(cell_config, **arms):
    """Arms by label from dotted changes."""
    cells = {label: cell_config(S=4, lr=1e-3, seed=0, **changes) for label, changes in arms.items()}
    return describe_arms(cells, {label: label for label in cells})


REINFORCE = {"choice": "reinforce", "beta": 0.0}


@pytest.mark.parametrize(
    ("arms", "reference", "why"),
    [
        ({"a": {"correction": [TIS]}, "b": {}}, "b", "only arm without"),
        # Most corrected arms build on the ratio-free loss.
        (
            {
                "clip": {},
                "pg": {"loss": REINFORCE},
                "pg+tis": {"loss": REINFORCE, "correction": [TIS]},
                "pg+icepop": {"loss": REINFORCE, "correction": [ICEPOP]},
                "clip+tis": {"correction": [TIS]},
            },
            "pg",
            "2 corrected arms build on this one",
        ),
        # Nothing builds on anything: the usual loss, then the smallest KL weight, then the name.
        ({"a": {"loss": REINFORCE}, "b": {}}, "b", "0 corrected arms"),
        ({"a": {"loss.beta": 0.04}, "b": {"loss.beta": 0.0}}, "b", "smallest KL weight"),
        ({"b": {"loss.epsilon": 0.1}, "a": {"loss.epsilon": 0.2}}, "a", "first by name"),
        (
            {"a": {"reduction": {"choice": "token_mean"}}, "b": {"reduction": {"choice": "own"}}},
            "b",
            "reduction of its",
        ),
        ({"a": {"correction": [TIS]}, "b": {"correction": [ICEPOP]}}, None, "push.reference"),
        ({"a": {"controller": [{"choice": "brake"}]}, "b": {}}, "b", "only arm"),
    ],
)
def test_the_reference(cell_config, arms, reference, why):
    (family,) = families(described(cell_config, **arms))
    assert (family.reference.label if family.reference else None) == reference
    assert why in family.why
    again = families(described(cell_config, **dict(reversed(arms.items()))))
    assert again == [family]


def cells_(cell_config, arms):
    return described(cell_config, **arms)


def test_a_reference_that_is_asked_for(cell_config):
    arms = cells_(cell_config, {"a": {"correction": [TIS]}, "b": {}})
    (family,) = families(arms, "a")
    assert family.reference.label == "a"
    assert "asked for" in family.why
    with pytest.raises(ValueError, match=r"push.reference='c': must be one of a; b"):
        families(arms, "c")


def test_only_matched_arms_are_compared(cell_config):
    arms = cells_(
        cell_config,
        {"8": {}, "8+tis": {"correction": [TIS]}, "16": {"task.num_prompts": 16}, "32": {"task.num_prompts": 32}},
    )
    (family,) = families(arms)
    assert [a.label for a in family.arms] == ["8", "8+tis"]


def test_kinds_of_delay_are_families_with_a_reference_each(cell_config):
    kinds = {"reuse": "reuse", "lag": "lag"}
    cells = {
        f"{kind}{'+' if c else ''}": cell_config(S=4, lr=1e-3, seed=0, kind=kind, correction=c)
        for kind in kinds
        for c in ([], [TIS])
    }
    cells["on-policy"] = cell_config(S=1, lr=1e-3, seed=0, kind="none")
    labels = {**{k: k for k in cells}, "on-policy": "reuse"}
    lag, reuse = families(describe_arms(cells, labels))
    assert (lag.name, reuse.name) == ("delay=lag", "delay=reuse")
    assert lag.reference.label == "lag"
    assert [a.label for a in reuse.arms] == ["reuse", "reuse+"]


def test_the_loss_that_an_arm_builds_on(cell_config):
    arms = cells_(
        cell_config,
        {
            "clip": {},
            "pg": {"loss": REINFORCE},
            "pg+": {"loss": REINFORCE, "correction": [TIS]},
            "c+": {"correction": [TIS]},
        },
    )
    (family,) = families(arms)
    base = {label: family.base_of(arm) for label, arm in arms.items()}
    assert {k: b.label for k, b in base.items()} == {"clip": "clip", "pg": "pg", "pg+": "pg", "c+": "clip"}


def test_records_from_before_a_group_existed_match_its_neutral_value(cell_config):
    old = cell_config(S=4, lr=1e-3, seed=0)
    new = {
        **cell_config(S=4, lr=1e-3, seed=0, correction=[TIS]),
        "proximal": {"choice": "recompute"},
        "reduction": {"choice": "own", "denominator": "valid", "advantages_over": "all", "skip_empty": False},
    }
    (family,) = families(describe_arms({"a": old, "b": new}, {"a": "a", "b": "b"}))
    assert family.base_of(family.arms[1]).label == "a"


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("loss=grpo, correction=token_tis, cap=2.0", "grpo, token_tis, cap=2.0"),
        ("correction=token_tis", "token_tis"),
        ("all", "all"),
    ],
)
def test_short_labels(cell_config, label, short):
    cells = {"x": cell_config(S=4, lr=1e-3, seed=0, correction=[TIS])}
    assert describe_arms(cells, {"x": label})[label].short == short

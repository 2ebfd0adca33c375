"""Every framework: its table and its file agree, its defaults can be composed, and wrong options say the way out."""

import pytest

from stalefront.choice import OptionError
from stalefront.frameworks import framework, names
from stalefront.recipe import defaults, entry, recipe


def refusal(name, **options):
    with pytest.raises(OptionError) as error:
        framework(name).recipe({key.replace("__", "."): value for key, value in options.items()})
    return str(error.value)


@pytest.mark.parametrize("name", names())
def test_defaults_are_complete_and_compose(name):
    chosen = framework(name)
    assert chosen.name == name
    assert chosen.defaults().keys() == chosen.options.keys()
    assert not chosen.options.keys() & chosen.not_shared.keys()
    assert chosen.recipe({}) == chosen.recipe(chosen.defaults())
    chosen.recipe({}).parts()


@pytest.mark.parametrize("name", names())
def test_sections_hold_an_option(name):
    chosen = framework(name)
    options = [*chosen.options.items(), *chosen.not_shared.items()]
    places = [place for key, option in options for place in ((key,) if option.paths is None else option.paths)]
    for section in chosen.sections:
        assert any(place.startswith(f"{section}.") for place in places), section


def test_a_framework_nobody_knows():
    with pytest.raises(OptionError, match=r"framework = 'vverl' .*Legal: one of areal, "):
        framework("vverl")


def test_an_unknown_option_names_its_neighbours():
    text = refusal("verl", clip_ratio_hgh=0.3)
    assert "framework.clip_ratio_hgh = 0.3 is not possible" in text
    assert "Did you mean clip_ratio_high" in text


def test_the_last_part_of_a_nested_name_is_enough_to_be_pointed_at():
    assert "train_infer_correction.is_weight.weight_type" in refusal("roll", weight_type="token")


def test_an_option_that_is_not_shared_says_why():
    assert "There is no entropy bonus." in refusal("verl", entropy_coeff=0.1)


def test_an_option_that_is_not_shared_may_be_off():
    assert framework("verl").recipe({"entropy_coeff": 0}) == framework("verl").recipe({})
    assert "is not shared" in refusal("verl", use_kl_in_reward=True)


@pytest.mark.parametrize(
    ("value", "part"), [("tokens", "one of token, sequence"), (3, "one of token, sequence"), (True, "one of")]
)
def test_a_wrong_type_or_word_is_refused(value, part):
    assert part in refusal("verl", rollout_is=value)


def test_nested_and_dotted_options_are_one():
    nested = framework("roll").recipe({"train_infer_correction": {"is_weight": {"enabled": True}}})
    assert nested == framework("roll").recipe({"train_infer_correction.is_weight.enabled": True})


def test_an_entry_has_the_defaults_of_its_file():
    usual = defaults("loss", "grpo")
    assert entry("loss", "grpo", epsilon=0.3) == {"choice": "grpo", **usual, "epsilon": 0.3}
    with pytest.raises(KeyError, match="loss=grpo has no epsilonn"):
        entry("loss", "grpo", epsilonn=0.3)


def test_overrides_hold_what_differs_from_the_defaults():
    made = recipe(
        entry("loss", "reinforce", scale_rewards="none"),
        correction=[entry("correction", "token_tis", cap=3.0), entry("correction", "normalize")],
        reduction=entry("reduction", "token_mean", denominator="kept"),
    )
    assert made.overrides() == [
        "loss=reinforce",
        "loss.scale_rewards=none",
        "correction=[token_tis,normalize]",
        "correction.token_tis.cap=3.0",
        "reduction=token_mean",
        "reduction.denominator=kept",
        "proximal=recompute",
    ]


def test_a_recipe_refuses_a_rule_twice():
    twice = [entry("correction", "token_tis"), entry("correction", "token_tis", cap=3.0)]
    with pytest.raises(OptionError, match="names each choice once"):
        recipe(entry("loss", "reinforce"), correction=twice).parts()

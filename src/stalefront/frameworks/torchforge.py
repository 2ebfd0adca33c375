"""torchforge: `SimpleGRPOLoss` of its GRPO application, a loss without a ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stalefront.frameworks import Framework, Option, Unshared
from stalefront.recipe import Recipe, entry, recipe

if TYPE_CHECKING:
    from stalefront.parity import Case, GoldenFile

OPTIONS = {"beta": Option(float)}

NOT_SHARED = {
    name: Unshared("It drops episodes by age; staleness is set by delay here.", off=(None,), paths=(path,))
    for name, path in (("max_policy_age", "replay_buffer.max_policy_age"), ("off_by_n", "off_by_n"))
}

QUIRKS = (
    "Its surrogate is the ratio of a policy to itself: the gradient is REINFORCE's, as here, and the loss's value "
    "another.",
    "An episode's age is counted when it is sampled from the buffer; here staleness is set by delay.",
)


def compose(o: dict[str, Any]) -> Recipe:
    """REINFORCE and a KL term, averaged over each sequence, then over sequences."""
    loss = entry("loss", "reinforce", beta=o["beta"], use_bias_correction_kl=False)
    return recipe(loss, reduction=entry("reduction", "sequence_mean"))


def case(file: GoldenFile) -> Case:
    """Its golden file is one of a staleness rule."""
    from stalefront.parity import LATER, Declined

    raise Declined(LATER)


FRAMEWORK = Framework(
    "torchforge",
    "meta-pytorch/torchforge 6e77f0b37596",
    OPTIONS,
    compose,
    case,
    not_shared=NOT_SHARED,
    quirks=QUIRKS,
)

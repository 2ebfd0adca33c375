"""Miles: its losses and corrections are slime's, with the same arguments; its staleness rule is its own."""

from __future__ import annotations

from stalefront.frameworks import Framework, Unshared, slime

FRAMEWORK = Framework(
    "miles",
    "radixark/miles 31f1ca961a94",
    slime.OPTIONS,
    slime.compose,
    slime.case,
    not_shared={
        **slime.NOT_SHARED,
        "max_weight_staleness": Unshared(
            "It filters groups as they are taken; staleness is set by delay here.", off=(None,)
        ),
    },
    quirks=(
        *slime.QUIRKS,
        "A group whose version is not known passes Miles' staleness filter without a word; here every token has its "
        "version.",
    ),
)

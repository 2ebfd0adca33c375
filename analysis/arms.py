"""What the arms of a sweep are: the method of each, which arms are matched, and which one the others are held against.

The method is the loss, the corrections, the controllers, the reduction and the proximal policy, all with their options.
Arms that share every other setting, the kind of delay included, form a *family*: only within one is anything compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stalefront.analysis.settings import NOT_ARM, Json, flatten

METHOD = ("loss", "correction", "controller", "reduction", "proximal")
# The loss taken as the plain one among equals.
USUAL_LOSS = "grpo"
# Values of the groups that records made before they existed lack (`stalefront.cell.NEUTRAL`).
NEUTRAL: dict[str, Json] = {
    "proximal": {"choice": "recompute"},
    "reduction": {
        **{"choice": "own", "denominator": "valid", "advantages_over": "all"},
        **{"skip_empty": False, "epsilon": 0.0, "epsilon_on": "both"},
    },
}
RULE = (
    "Among the arms without correction and controller, the one on whose loss, reduction and proximal policy most other "
    f"arms build; among equals, one with the reduction of its loss, recomputed proximal policy, loss={USUAL_LOSS} and "
    "the smallest KL weight, in this order, then the first by name."
)


@dataclass(frozen=True)
class Arm:
    """The method of one arm, and everything else it fixes.

    Parameters
    ----------
    label : str
        Name of the arm in the run table.
    loss : str
        Choice of the loss.
    beta : float
        Weight of its KL term.
    corrections, controllers : tuple of str
        Choices, in order.
    reduction, proximal : str
        Choices.
    base : str
        Loss, reduction and proximal policy with all options: what corrections and controllers are put on.
    family : str
        Every setting outside the method, apart from seed, learning rate and S.
    clipped : bool
        The loss has a clip, whose activity is on record.
    """

    label: str
    loss: str
    beta: float
    corrections: tuple[str, ...]
    controllers: tuple[str, ...]
    reduction: str
    proximal: str
    base: str
    family: str
    clipped: bool = False

    @property
    def corrected(self) -> bool:
        """Whether anything is put on the loss."""
        return bool(self.corrections or self.controllers)

    @property
    def short(self) -> str:
        """The label without what is not there: ``loss=grpo, correction=none, cap=2`` → ``grpo, cap=2``."""
        parts = [p for p in self.label.split(", ") if p not in ("correction=none", "controller=none")]
        names = {f"loss={self.loss}": self.loss, f"correction={'+'.join(self.corrections)}": "+".join(self.corrections)}
        return ", ".join(names.get(p, p) for p in parts) or self.label


@dataclass(frozen=True)
class Family:
    """Matched arms: ``name`` says what tells this family from others (empty if it is the only one).

    ``reference`` is the arm the others are held against, None if every arm is corrected; ``why`` says how it was found.
    """

    name: str
    arms: tuple[Arm, ...]
    reference: Arm | None
    why: str

    def base_of(self, arm: Arm) -> Arm | None:
        """The uncorrected arm with the loss, reduction and proximal policy of ``arm``."""
        return next((a for a in self.arms if a.base == arm.base and not a.corrected), None)


def describe_arms(cells: dict[str, Json], labels: dict[str, str]) -> dict[str, Arm]:
    """Method and family of every arm.

    Parameters
    ----------
    cells : dict
        cell_id → resolved cell.
    labels : dict
        cell_id → label of its arm.

    Returns
    -------
    dict
        Label → Arm, in order of the labels.
    """
    members: dict[str, list[Json]] = {}
    for cell_id, label in labels.items():
        if cells[cell_id]:
            members.setdefault(label, []).append(cells[cell_id])
    return {label: _describe(label, members[label]) for label in sorted(members)}


def _describe(label: str, cells: list[Json]) -> Arm:
    cell = cells[0]
    loss = cell.get("loss") or {}
    base = {group: _without_defaults(group, cell.get(group)) for group in ("loss", "reduction", "proximal")}
    return Arm(
        label=label,
        loss=str(loss.get("choice", "unknown")),
        beta=float(loss.get("beta") or 0.0),
        corrections=tuple(str(c.get("choice")) for c in cell.get("correction") or []),
        controllers=tuple(str(c.get("choice")) for c in cell.get("controller") or []),
        reduction=str((cell.get("reduction") or {}).get("choice", "own")),
        proximal=str((cell.get("proximal") or {}).get("choice", "recompute")),
        base=json.dumps(base, sort_keys=True),
        family=_family(cells),
        clipped="epsilon" in loss,
    )


def _without_defaults(group: str, value: Any) -> Any:
    """A group that a record made before it existed lacks is at its neutral value."""
    neutral = NEUTRAL.get(group)
    return None if neutral and all(v == neutral.get(k, v) for k, v in (value or {}).items()) else value


def _family(cells: list[Json]) -> str:
    """Settings outside the method; on-policy cells without delay belong to the kind of delay of the others."""
    shared: Json = {}
    kinds = sorted({str((c.get("delay") or {}).get("choice", "unknown")) for c in cells} - {"none"})
    for cell in cells:
        flat = flatten({k: v for k, v in cell.items() if k not in METHOD})
        shared.update({k: v for k, v in flat.items() if k not in NOT_ARM and k != "delay.choice"})
    return json.dumps({**shared, "delay.choice": "+".join(kinds) or "none"}, sort_keys=True)


def families(arms: dict[str, Arm], asked: str | None = None) -> list[Family]:
    """Group arms into families of two or more and choose the reference of each.

    Parameters
    ----------
    arms : dict
        Label → Arm.
    asked : str, optional
        Label of the reference for the family that holds it; the rule decides in the others.

    Raises
    ------
    ValueError
        If no arm is called ``asked``.
    """
    if asked is not None and asked not in arms and len(arms) > 1:
        raise ValueError(f"push.reference={asked!r}: must be one of {'; '.join(sorted(arms))}")
    grouped: dict[str, list[Arm]] = {}
    for arm in arms.values():
        grouped.setdefault(arm.family, []).append(arm)
    names = _names(list(grouped))
    found = []
    for key in sorted(grouped, key=lambda k: names[k]):
        mine = tuple(sorted(grouped[key], key=lambda a: a.label))
        if len(mine) > 1:
            found.append(Family(names[key], mine, *_reference(mine, asked)))
    return found


def _reference(arms: tuple[Arm, ...], asked: str | None) -> tuple[Arm | None, str]:
    """The arm the others are held against, and why it is this one."""
    for arm in arms:
        if arm.label == asked:
            return arm, "It was asked for by the setting push.reference."
    plain = [a for a in arms if not a.corrected]
    if not plain:
        return None, "Every arm has a correction or a controller; name a reference by the setting push.reference."
    built = {a.label: sum(b.corrected and b.base == a.base for b in arms) for a in plain}
    first = min(
        plain,
        key=lambda a: (
            -built[a.label],
            a.reduction != "own",
            a.proximal != "recompute",
            a.loss != USUAL_LOSS,
            a.beta,
            a.label,
        ),
    )
    if len(plain) == 1:
        return first, "It is the only arm without correction and controller."
    n = built[first.label]
    others = f"{len(plain)} arms have neither correction nor controller. "
    return first, f"{others}{RULE} {n} corrected arm{'' if n == 1 else 's'} build{'s' if n == 1 else ''} on this one."


def _names(keys: list[str]) -> dict[str, str]:
    """What tells families apart, in words."""
    flats = {key: json.loads(key) for key in keys}
    varying = sorted({k for f in flats.values() for k in f if len({json.dumps(g.get(k)) for g in flats.values()}) > 1})
    # The kind of delay decides which options of it there are.
    shown = [k for k in varying if not k.startswith("delay.") or k == "delay.choice"] or varying
    for keys_named in (shown, varying):
        named = {
            key: ", ".join(f"{k.removesuffix('.choice')}={f[k]}" for k in keys_named if k in f)
            for key, f in flats.items()
        }
        if len(set(named.values())) == len(named):
            break
    return named

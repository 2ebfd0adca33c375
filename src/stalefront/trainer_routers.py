"""Experts in the trainer's forwards: recorded, replayed, and compared with what was replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from stalefront.policy import token_logps
from stalefront.routing import Recorded, RouterTap, flips_LBT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stalefront.batch import RolloutBatch
    from stalefront.build import Parts
    from stalefront.cell import Cell


class OwnRoutes(Protocol):
    """What the routers of a forward choose by themselves."""

    @property
    def own_LBTK(self) -> Tensor:
        """Experts, int16."""


class _Chosen:
    """Routes of one recorded forward over (B, T) tokens."""

    def __init__(self, recorded: Recorded, shape: torch.Size) -> None:
        self.recorded, self.shape = recorded, shape

    @property
    def own_LBTK(self) -> Tensor:
        routes_LNK = self.recorded.routes_LNK()
        return routes_LNK.view(len(routes_LNK), *self.shape, routes_LNK.shape[-1])


class _Nothing:
    """A forward of a model whose routers are not looked at."""

    @property
    def own_LBTK(self) -> Tensor:
        raise AssertionError("this model's routers are not looked at")


class TrainerRouters:
    """Taps of the modules that the trainer runs; does nothing where the model has no routers."""

    def __init__(self, routed: bool) -> None:
        self.routed = routed
        self._taps: dict[int, RouterTap] = {}

    @contextmanager
    def around(self, model: PreTrainedModel, piece: RolloutBatch, routes_LBTK: Tensor | None) -> Iterator[OwnRoutes]:
        """A forward, and its backward, over `piece` under these routes; without any, its own are recorded."""
        if not self.routed:
            yield _Nothing()
            return
        if id(model) not in self._taps:
            self._taps[id(model)] = RouterTap(model)
        tap = self._taps[id(model)]
        if routes_LBTK is not None:
            with tap.replaying(routes_LBTK) as replayed:
                yield replayed
        else:
            with tap.recording() as recorded:
                yield _Chosen(recorded, piece.tokens_BT.shape)


class LearnerRouters:
    """What the learner's routers do in one step, and what replay makes of the policy."""

    def __init__(self, cell: Cell, parts: Parts) -> None:
        self.cell, self.parts = cell, parts
        self.routers = TrainerRouters(parts.routed)
        self._probes = False
        self._clear()

    def _clear(self) -> None:
        # Drifted and counted decisions; summed gap and tokens it was measured on.
        self._sums = torch.zeros(4, dtype=torch.float64)

    def start(self, step: int) -> None:
        """Begin learner step `step`."""
        self._clear()
        every = self.cell.replay.probe_every
        self._probes = self.cell.replay.acts and bool(every) and (step - 1) % every == 0

    @contextmanager
    def around(self, piece: RolloutBatch) -> Iterator[None]:
        """The forward and the backward of a micro-batch."""
        routes = self.cell.replay.in_theta(piece)
        with self.routers.around(self.parts.model, piece, routes) as seen:
            yield
            compared = piece.own_routes_LBTK if routes is None else routes
            if compared is not None:
                flips = flips_LBT(seen.own_LBTK, compared)[:, piece.mask_BT]
                known = (compared != -1).all(-1)[:, piece.mask_BT]
                self._sums[:2] += torch.tensor([int(flips.sum()), int(known.sum())], dtype=torch.float64)

    @contextmanager
    def like_theta(self, model: PreTrainedModel, piece: RolloutBatch) -> Iterator[None]:
        """A forward of another module that θ is compared with: it takes the experts that are replayed for θ."""
        routes = self.cell.replay.in_theta(piece)
        with nullcontext() if routes is None else self.routers.around(model, piece, routes):
            yield

    @torch.no_grad()
    def probe(self, piece: RolloutBatch, logp_theta_BT: Tensor) -> None:
        """Where one is due, score the micro-batch by the routers' own choices and compare."""
        if not self._probes:
            return
        own = token_logps(
            self.parts.model,
            piece.tokens_BT,
            piece.position_BT,
            piece.mask_BT,
            temperature=self.cell.task.temperature,
            support_BTK=piece.support_BTK,
        )
        log_ratio = (own.logp_BT - logp_theta_BT)[piece.mask_BT].double()
        self._sums[2] += float((torch.expm1(log_ratio) - log_ratio).sum())
        self._sums[3] += log_ratio.numel()

    def columns(self) -> dict[str, Any]:
        """Columns of the step: absent where nothing is routed, or was not probed."""
        if not self.parts.routed:
            return {}
        self.parts.ranks.sum_([self._sums])
        drifted, decisions, gap, tokens = self._sums.tolist()
        return {
            "route_drift_frac": drifted / decisions if decisions else float("nan"),
            "replay_gap_k3_nats": gap / tokens if tokens else None,
        }

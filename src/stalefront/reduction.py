"""How token losses become one number: a fixed weight a token, so that micro-batches add up to the whole batch.

loss = Σ_bt reduction_BT · token_loss_BT. The weights depend on the mask of the *whole* batch of a learner step;
a micro-batch takes its rows of them, and the gradients of all micro-batches add up exactly to the batch's.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Reduction = Literal["sequence_mean", "token_mean", "constant"]


def reduction_BT(mask_BT: Tensor, kind: Reduction, *, max_completion_length: int) -> Tensor:
    """Weight of every token's loss.

    Parameters
    ----------
    mask_BT : bool (B, T)
        Completion tokens.
    kind
        `sequence_mean` 1/(B · |y_b|): mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3);
        `token_mean` 1/Σ|y|: every token counts the same (DAPO, arXiv 2503.14476);
        `constant` 1/(B · L) with L = `max_completion_length`: no length enters (Dr. GRPO, arXiv 2503.20783).

    Notes
    -----
    A sequence without a completion token has weight 0 everywhere and still counts in B.
    """
    mask = mask_BT.float()
    batch = mask_BT.shape[0]
    if kind == "sequence_mean":
        return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * batch)
    if kind == "token_mean":
        return mask / mask.sum().clamp(min=1)
    return mask / (batch * max_completion_length)

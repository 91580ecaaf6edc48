"""How many drafts of a block survive: equality with the tokens the target chose, greedy and sampled alike.

The target's token at a position is a function of its logits there and of (seed, position) (`drafter.choice`),
so it is the token that would have been chosen without drafting. A draft is accepted exactly when it equals
that token. This promises more than rejection sampling, which keeps the target's distribution but not the
tokens: here drafting on, off, split over workers or replayed after a failure yields the same tokens, sampled
ones too, and the distribution is the target's by construction. Sharing the noise between draft and target
makes equality about as likely as rejection sampling's acceptance.

Everything before the first difference was verified in its own context; everything after it was not.
"""

from __future__ import annotations

from torch import Tensor


def accept(draft_BK: Tensor, target_BK1: Tensor) -> Tensor:
    """Accepted drafts per request, int64 [B], each in 0 .. K.

    draft_BK: drafted token ids. target_BK1: the target's choice after the anchor and after each draft; a
    request that accepts `a` drafts emits target_BK1[b, : a + 1], of which the last is the target's own next
    token. Raises ValueError when the shapes do not match.
    """
    if target_BK1.shape != (draft_BK.shape[0], draft_BK.shape[1] + 1):
        raise ValueError(
            f"drafts {tuple(draft_BK.shape)} need one target token more, got {tuple(target_BK1.shape)}"
        )
    return (draft_BK == target_BK1[:, :-1]).long().cumprod(dim=1).sum(dim=1)

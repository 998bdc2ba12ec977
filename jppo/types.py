"""Records that travel between the stages: frozen dataclasses of arrays, nothing else.

Shapes: b sequences · p prompt positions · t response positions · s = p + t.
"""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

Params = dict[str, Any]


@struct.dataclass
class Prompts:
    """Left-padded prompts. A row of weight 0 is padding and counts nowhere."""

    tokens: Int[Array, "b p"]
    mask: Bool[Array, "b p"]
    weight: Float[Array, " b"]
    row: Int[Array, " b"]  # id of the row in this step: the key of its sample


@struct.dataclass
class Rollout:
    """Prompts with the responses that the policy drew for them.

    `mask` holds every token that the policy chose, the stop token included.
    """

    tokens: Int[Array, "b s"]
    valid: Bool[Array, "b s"]
    mask: Bool[Array, "b t"]
    logp: Float[Array, "b t"]  # the decoder's, full vocabulary
    stopped: Bool[Array, " b"]
    stop_index: Int[Array, " b"]  # which stop id ended the row; −1: ran out of slots
    lengths: Int[Array, " b"]


@struct.dataclass
class Experience:
    """All that an update needs, computed once a rollout.

    `actor_in` and `critic_in` are what the trainable parts of actor and critic eat:
    token ids, or the frozen trunk's hidden states.
    """

    actor_in: Array
    critic_in: Array | None
    tokens: Int[Array, "b t"]
    valid: Bool[Array, "b s"]
    mask: Bool[Array, "b t"]
    logp_old: Float[Array, "b t"]
    logp_ref: Float[Array, "b t"]
    values_old: Float[Array, "b t"]
    advantages: Float[Array, "b t"]
    returns: Float[Array, "b t"]
    scores: Float[Array, " b"]
    weights: Float[Array, "b t"]  # sampler-mismatch weights; 1 where off


@struct.dataclass
class Frozen:
    """Trees that never change: bare arrays, no optimizer state.

    Roles that stand on the same weights hold the same arrays.
    """

    actor_base: Params  # trunk below actor and reference; empty when all is trained
    critic_base: Params
    reference: Params  # the actor as it began: what the actor is laid over
    critic_under: Params  # what the critic is laid over; empty without an adapter
    reward: Params | None  # None: scores come from Python
    reward_base: Params | None  # None: the reward model stands on `critic_base`


@struct.dataclass
class TrainState:
    """All that changes in training, and so all that a checkpoint must hold."""

    actor: Params
    critic: Params
    opt_actor: Any
    opt_critic: Any
    beta: Float[Array, ""]
    key: Key[Array, ""]
    step: Int[Array, ""]


@struct.dataclass
class FitState:
    """All that changes while one model is fitted: what learns, and its moments."""

    params: Params
    opt: Any
    step: Int[Array, ""]


@struct.dataclass
class FitFrozen:
    """What a fitted model stands on: a trunk, and what its leaves are laid over.

    Either may be empty. `under` is also the model as it began: DPO's reference.
    """

    base: Params
    under: Params


@struct.dataclass
class TokenBatch:
    """Texts to learn from; several may stand in a row, told apart by `segments`."""

    tokens: Int[Array, "*n b s"]
    valid: Bool[Array, "*n b s"]
    trained: Bool[Array, "*n b s"]  # tokens to be predicted
    segments: Int[Array, "*n b s"]


@struct.dataclass
class PairBatch:
    """Chosen and rejected texts in turns: row 2i beats row 2i + 1."""

    tokens: Int[Array, "*n b2 s"]
    valid: Bool[Array, "*n b2 s"]
    completion: Bool[Array, "*n b2 s"]
    weight: Float[Array, "*n b2"]  # 0: padding
    margin: Float[Array, "*n b2"]


@struct.dataclass
class RankedBatch:
    """Texts of which some beat others; x: token ids or a trunk's output."""

    x: Array
    valid: Bool[Array, "*n b s"]
    at: Int[Array, "*n b r"]  # positions that are read
    better: Bool[Array, "*n b b"]  # [i, j]: text i beats text j
    margin: Float[Array, "*n b b"]

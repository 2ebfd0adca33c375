"""Our losses and advantages against the installed TRL: value, and gradient with respect to every parameter.

TRL's side is `GRPOTrainer._compute_loss` on a hand-built batch. The two sides share no code: TRL runs its own forward
(left-padded, without position ids) and its own log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from stalefront.advantage import group_advantages
from stalefront.batch import LossInputs
from stalefront.policy import token_logps
from stalefront.reduction import reduction_BT

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
]

# loss → TRL's loss_type and importance_sampling_level
NAMES = {name: (name, "token") for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")} | {
    "gspo": ("grpo", "sequence")
}
LIMIT = 9  # max_completion_length, longer than any completion of the batch
TOLERANCE = 1e-5


class Sequences(NamedTuple):
    """Four prompts of 2–5 tokens, completions of 1–6 tokens."""

    tokens_BT: torch.Tensor
    position_BT: torch.Tensor
    mask_BT: torch.Tensor
    width: int  # of the prompt part


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    random = torch.Generator().manual_seed(3)
    prompt, answer = torch.tensor([2, 5, 3, 5, 4, 2]), torch.tensor([6, 1, 4, 2, 6, 3])
    width, length = int(prompt.max()), int(answer.max())
    place = torch.arange(width + length)
    position = place - (width - prompt)[:, None]
    mask = (place >= width) & (place < width + answer[:, None])
    tokens = torch.randint(2, 16, position.shape, generator=random)
    real = (position >= 0) & (place < width + answer[:, None])
    return Sequences(tokens.where(real, 0), position.clamp(min=-1), mask, width)


@pytest.fixture(scope="module")
def tiny(make_cell: Callable[..., Any]) -> Any:
    """The tiny model with large enough weights that log-probs differ between tokens, and its tokenizer."""
    options = make_cell().model
    tokenizer = options.tokenizer()
    model = options.build(tokenizer, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    return model, tokenizer


@pytest.fixture
def trainer(tiny: Any, tmp_path: Any) -> Callable[..., GRPOTrainer]:
    """`trainer(loss, temperature=1.0)`: a `GRPOTrainer` of the same options on the tiny model."""
    model, tokenizer = tiny

    def make(loss: Any, *, temperature: float = 1.0, **options: Any) -> GRPOTrainer:
        loss_type, level = NAMES[loss.choice()]
        clip = {name: getattr(loss, name) for name in ("epsilon", "epsilon_high", "delta") if hasattr(loss, name)}
        config = GRPOConfig(
            output_dir=str(tmp_path),
            loss_type=loss_type,
            importance_sampling_level=level,
            use_bias_correction_kl=loss.use_bias_correction_kl,
            scale_rewards=loss.scale_rewards,
            beta=0.0,
            temperature=temperature,
            max_completion_length=LIMIT,
            per_device_train_batch_size=6,
            num_generations=3,
            bf16=False,
            activation_checkpointing=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **clip,
        )
        made = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["_12345>"] * 2}),
            processing_class=tokenizer,
            **options,
        )
        made.beta = loss.beta  # given to the constructor, it loads a reference model by name
        made.current_gradient_accumulation_steps = 1
        made.model.train()
        return made

    yield make
    # TRL wraps the forward of the model it is given; take that off again.
    model.__dict__.pop("forward", None)
    model.eval()


@pytest.fixture(scope="module")
def stale(tiny: Any, sequences: Sequences) -> Callable[[float], LossInputs]:
    """Inputs of a loss at a temperature: |log θ/old| up to 1, advantages of both signs, a reference nearby."""

    def make(temperature: float) -> LossInputs:
        tokens, position, mask, _ = sequences
        with torch.no_grad():
            theta = token_logps(tiny[0], tokens, position, mask, temperature=temperature).logp_BT
        random = torch.Generator().manual_seed(11)
        noise, other = (2 * torch.rand(theta.shape, generator=random) - 1 for _ in range(2))
        # Whole rows drift as well, so that the clip of sequence ratios is active on both sides too.
        drift = torch.tensor([0.45, -0.45, -0.45, -0.45, 0.45, 0.45])
        old, ref = theta - drift[:, None] - 0.55 * noise, theta + other
        advantage = torch.tensor([1.3, -0.9, 0.4, -1.7, -0.8, 2.1])
        return LossInputs(theta, old, old, ref, advantage, mask)

    return make


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta": 0.04, "use_bias_correction_kl": True},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"epsilon": 0.1, "epsilon_high": 0.28},
    {"delta": 1.4, "beta": 0.04},
]
CASES = [
    *((name, variant, 1.0) for name in CLIPPED for variant in VARIANTS),
    *(("cispo", variant, 1.0) for variant in [*VARIANTS[:3], {"epsilon_high": 1.5}, {"epsilon_high": 0.2}]),
    ("grpo", {"beta": 0.04}, 0.7),
    ("dapo", {}, 1.6),
]


@pytest.mark.parametrize(("name", "options", "temperature"), CASES)
def test_loss_and_gradient(name, options, temperature, make_loss, tiny, sequences, stale, trainer):
    model, (tokens, position, mask, width) = tiny[0], sequences
    # The sequence ratio averages over a row, so that only a narrow clip is active on both sides.
    narrow = {"epsilon": 0.05} if name == "gspo" and "epsilon" not in options else {}
    loss, inputs = make_loss(name, **(narrow | options)), stale(temperature)

    theirs = trainer(loss, temperature=temperature)
    batch = {
        "prompt_ids": tokens[:, :width],
        "prompt_mask": (position[:, :width] >= 0).long(),
        "completion_ids": tokens[:, width:],
        "completion_mask": mask[:, width:].long(),
        "advantages": inputs.advantage_B,
        "old_per_token_logps": inputs.logp_old_BT[:, width:],
        "ref_per_token_logps": inputs.logp_ref_BT[:, width:],
        "num_items_in_batch": mask.sum(),
    }
    expected = theirs._compute_loss(model, batch)
    expected_grad = gradient(expected, model)

    theta = token_logps(model, tokens, position, mask, temperature=temperature).logp_BT
    live = LossInputs(theta, inputs.logp_old_BT, inputs.logp_behav_BT, inputs.logp_ref_BT, inputs.advantage_B, mask)
    value = loss(live, None, reduction_BT(mask, loss.reduction, max_completion_length=LIMIT))
    ours_grad = gradient(value.loss, model)

    assert value.loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    assert float((ours_grad - expected_grad).norm() / expected_grad.norm()) < TOLERANCE
    if name in CLIPPED:
        assert value.clip_low_BT[mask].any()
        assert value.clip_high_BT[mask].any()
    assert 0.8 < live.log_ratio_BT.detach().abs().max() <= 1.0


def gradient(loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()])


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0], [0.3, -2.5, 7.0, 0.1, 0.2, 0.4]]
)
def test_advantages(rewards, scale_rewards, make_loss, trainer):
    def rollout(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        size = len(prompts)
        return {"prompt_ids": [[2, 3]] * size, "completion_ids": [[4, 1]] * size, "logprobs": [[-1.0, -1.0]] * size}

    theirs = trainer(make_loss("grpo", scale_rewards=scale_rewards), rollout_func=rollout)
    theirs.reward_funcs = [lambda **_: rewards]
    expected = theirs._generate_and_score_completions([{"prompt": "_12345>"}] * 6)["advantages"]
    reward = torch.tensor(rewards, dtype=torch.float64)
    ours = group_advantages(reward, num_generations=3, scale_rewards=scale_rewards).advantage_B
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=1e-6)

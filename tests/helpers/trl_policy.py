"""Rollouts with random log-probabilities and rewards, and what TRL's trainers compute for them."""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

GROUPS, GENERATIONS, LENGTH, EOS = 3, 4, 7, 1
COUNT = GROUPS * GENERATIONS
PROMPT = [5, 6]


class Rollouts(NamedTuple):
    """Values of COUNT answers of at most LENGTH tokens."""

    lengths: Tensor
    is_truncated: Tensor
    tool_mask: Tensor  # (COUNT, LENGTH), 0: observations of an environment
    logps: Tensor  # of the model in training, with gradients
    entropies: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    sampling_logps: Tensor
    scores: Tensor  # (COUNT, 2), NaN where a reward does not apply

    @property
    def in_length(self) -> Tensor:
        return torch.arange(LENGTH) < self.lengths[:, None]

    @property
    def loss_mask(self) -> Tensor:
        return self.in_length & self.tool_mask.bool()


def make_rollouts(spread: float = 0.4, seed: int = 0) -> Rollouts:
    """`spread` is the standard deviation of the differences between log-probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(COUNT, LENGTH, generator=generator)

    lengths = torch.randint(1, LENGTH + 1, (COUNT,), generator=generator)
    old = -noise(1.0).abs()
    tool_mask = (torch.rand(COUNT, LENGTH, generator=generator) < 0.8).int()
    tool_mask[:, 0] = 1
    scores = torch.randn(COUNT, 2, generator=generator)
    scores[1, 0], scores[2] = torch.nan, torch.nan
    scores[GENERATIONS : 2 * GENERATIONS] = 0.5  # a group without spread
    return Rollouts(
        lengths,
        torch.rand(COUNT, generator=generator) < 0.3,
        tool_mask,
        (old + noise(spread)).requires_grad_(),
        noise(1.0).abs(),
        old,
        old + noise(spread),
        old + noise(spread / 4),
        scores,
    )


class Metrics(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]


class Accelerator(SimpleNamespace):
    """One process."""

    device = torch.device("cpu")
    num_processes, process_index = 1, 0

    def gather(self, x: Any) -> Any:
        return x

    def reduce(self, x: Any, reduction: str) -> Any:
        return x

    def pad_across_processes(self, x: Any, **_: Any) -> Any:
        return x


REWARDS = {
    "reward_weights": torch.tensor([1.0, 0.5]),
    "reward_func_names": ["first", "second"],
    "reward_funcs": [None, None],
}


def make_trainer(rollouts: Rollouts, trainer_class: type, **changes: Any) -> Any:
    """The attributes that TRL's trainers read. `changes` are keys of GRPOConfig or RLOOConfig."""
    options: dict[str, Any] = {
        "loss_type": "dapo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2,
        "beta": 0.0, "scale_rewards": "group", "mask_truncated_completions": False, "top_entropy_quantile": 1.0,
        "use_vllm": False, "vllm_importance_sampling_correction": False, "off_policy_mask_threshold": None,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None, "max_completion_length": LENGTH, "num_iterations": 2,
        "num_generations": GENERATIONS, "multi_objective_aggregation": "sum_then_normalize",
        "normalize_advantages": False, "reward_clip_range": None,
    } | changes  # fmt: skip
    args = {
        "delta": None, "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "per_device_train_batch_size": COUNT, "per_device_eval_batch_size": COUNT, "gradient_accumulation_steps": 1,
        "steps_per_generation": 1, "gradient_checkpointing_kwargs": None, "report_to": [],
    } | {name: options[name] for name in options.keys() & {"delta", "use_bias_correction_kl"}}  # fmt: skip
    answers = [torch.full((int(n),), 9).tolist() for n in rollouts.lengths]
    for answer, is_truncated in zip(answers, rollouts.is_truncated, strict=True):
        answer[-1] = 9 if is_truncated else EOS
    masks = [row[:n].tolist() for row, n in zip(rollouts.tool_mask, rollouts.lengths, strict=True)]
    sampling = [row[:n].tolist() for row, n in zip(rollouts.sampling_logps, rollouts.lengths, strict=True)]
    generated = [PROMPT] * COUNT, answers, masks, answers, sampling, {}, None, None
    if trainer_class is RLOOTrainer:
        generated = [PROMPT] * COUNT, answers, answers
    calls = iter([rollouts.old_logps] + ([rollouts.ref_logps] if options["beta"] else []))
    return SimpleNamespace(
        **options, **REWARDS,
        args=SimpleNamespace(**args),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model="reference",
        environment_factories=None, environments=None, tools=None, aux_loss_enabled=False, _is_vlm=False,
        _tokenizer=SimpleNamespace(pad_token_id=0), pad_to_multiple_of=None, eos_token_ids=[EOS],
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        chat_template_kwargs={}, _pending_extra_logs={}, _pending_metrics={}, log_multimodal=False,
        _metrics={"train": Metrics()}, _logs={"prompt": [], "completion": [], "rewards": Metrics(),
                                              "advantages": [], "extra": Metrics()},
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: rollouts.scores,
        get_high_entropy_mask=partial(GRPOTrainer.get_high_entropy_mask, SimpleNamespace(accelerator=Accelerator())),
        _get_per_token_logps_and_entropies=lambda *_, compute_entropy=False, **__: (
            (rollouts.logps, rollouts.entropies, None) if compute_entropy else (next(calls), None, None)
        ),
    )  # fmt: skip


def trl_step(rollouts: Rollouts, trainer_class: type = GRPOTrainer, **changes: Any) -> tuple[Tensor, Tensor, dict]:
    """Loss, advantages and metrics of TRL for one step that trains all rollouts."""
    trainer = make_trainer(rollouts, trainer_class, **changes)
    inputs = trainer_class._generate_and_score_completions(trainer, [{"prompt": "?"}] * COUNT)  # pyright: ignore
    loss = trainer_class._compute_loss(trainer, None, inputs)  # pyright: ignore
    return loss, inputs["advantages"], {name: values[0] for name, values in trainer._metrics["train"].items()}

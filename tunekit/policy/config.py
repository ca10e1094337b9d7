"""The keys that recipes with sampled answers share, and their checks."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from tunekit.config.choices import kind_name
from tunekit.data.check_target import ColumnReaders
from tunekit.data.dataloader.mixture import MixtureBase
from tunekit.data.dataloader.prompt_data import PromptData, PromptDataset
from tunekit.data.dataloader.summary import format_count
from tunekit.data.readers.open_dataset import find_data_files
from tunekit.data.readers.row_reader import Row
from tunekit.environments.config import EnvironmentChoice
from tunekit.errors import FieldError, UserError, check_range
from tunekit.generation.sampling import MIN_TEMPERATURE, SamplingConfig
from tunekit.losses.policy_gradient import PolicyGradientLoss
from tunekit.policy.engine_config import EngineChoice, NativeEngineConfig
from tunekit.rewards.base import check_rewards, combine_readers
from tunekit.rewards.config import RewardChoice
from tunekit.training.config import TrainConfig, check_training
from tunekit.training.reference_model import AutoReference, PolicyReference


@dataclass(frozen=True)
class RolloutSamplingConfig(SamplingConfig):
    """Sampling options of the answers to train on. Log-probabilities are those before top_k, top_p and min_p."""

    temperature: float = 1.0  # Sampling temperature, by which logits are also divided in training
    max_new_tokens: int = 512  # Maximum length of an answer in tokens (max_completion_length in TRL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise FieldError("temperature", "must be > 0: all answers to a prompt would be the same, got 0")
        check_range(self, "temperature", ge=MIN_TEMPERATURE)
        if self.repetition_penalty != 1:
            problem = "must be 1: log-probabilities of training have no penalty"
            raise FieldError("repetition_penalty", f"{problem}, got {self.repetition_penalty}")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(TrainConfig):
    """Keys of recipes that train on sampled answers.

    `global_batch_size` counts answers, as in TRL: a step trains `global_batch_size / num_generations` prompts.
    """

    data: PromptData  # Prompts to answer
    eval_data: PromptData | None = None  # Held-out prompts: each gets one answer, and the mean reward is a metric
    rewards: tuple[RewardChoice, ...] = ()  # Reward functions, whose weighted scores are added up
    environment: EnvironmentChoice | None = None  # Tools and turns; its reward is added. null: one answer to a prompt
    num_generations: int = 8  # Answers to each prompt
    sampling: RolloutSamplingConfig = RolloutSamplingConfig()  # How answers are sampled
    engine: EngineChoice = NativeEngineConfig()  # Where answers are generated
    max_num_seqs: int = 64  # Answers that a device generates at once, or has requested from a server
    reference: PolicyReference = AutoReference()  # Reference model; only used if the loss has a KL divergence
    # Stop if the mean difference between the log-probabilities of sampling and training exceeds this; null: 0.2, or no
    # limit with loss.importance_sampling_correction and engine=native
    max_logprob_drift: float | None = None
    global_batch_size: int = 16  # Answers per optimizer step, over all devices: prompts times num_generations
    micro_batch_size: int = 1  # Answers per forward pass on one device; with data.packing, rows of several answers
    num_completions_to_print: int = 0  # Answers of each generation to print; all are in `completions.jsonl`
    num_episodes_to_save: int = 8  # Answers of each generation in `episodes.jsonl` with all tokens, for `tune episodes`
    metric_for_best_model: str = "reward"  # Metric of the evaluation, such as `reward` or `rewards/exact_match/mean`
    loss: PolicyGradientLoss  # each recipe lists its losses

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "num_generations", "max_num_seqs", ge=1)
        check_range(self, "num_episodes_to_save", ge=0)
        if self.global_batch_size % self.num_generations:
            problem = f"must be a multiple of num_generations={self.num_generations}, got {self.global_batch_size}"
            raise FieldError("global_batch_size", f"{problem}. It counts answers, not prompts.")
        self.engine.check(self.adapter)
        if self.max_logprob_drift is not None and self.max_logprob_drift <= 0:
            raise FieldError("max_logprob_drift", f"must be > 0 or null, got {self.max_logprob_drift}")
        if not self.rewards and self.environment is None:
            raise FieldError("rewards", "needs a reward, such as [{kind: exact_match, column: answer}], or environment")
        for key, data in (("data", self.data), ("eval_data", self.eval_data)):
            if data is not None and data.max_length <= self.sampling.max_new_tokens:
                problem = f"must be more than sampling.max_new_tokens={self.sampling.max_new_tokens:,}"
                raise FieldError(f"{key}.max_length", f"{problem}, as it includes the prompt, got {data.max_length:,}")
            if self.environment is not None and data is not None:
                check_is_chat(key, data)
        self.check_loss()

    def check_loss(self) -> None:
        """Raise FieldError if the loss does not work with the other keys."""
        loss = self.loss
        if not loss.needs_reference and not isinstance(self.reference, AutoReference):
            key = f"loss.{loss.kl_key}"
            raise FieldError("reference", f"{key}=0 needs no reference. Remove the key, or set {key}.")
        self.reference.check_adapter(self.adapter, "Set reference=copy.")
        if loss.needs_groups and self.num_generations < 2:
            problem = (
                f"must be >= 2: {kind_name(type(loss))} compares the answers to a prompt, got {self.num_generations}"
            )
            raise FieldError("num_generations", problem)
        if loss.is_sequence_level and self.parallel.cp > 1:
            raise FieldError("parallel.cp", "must be 1 for losses with one probability ratio per answer")

    @property
    def steps_per_generation(self) -> int:
        """Optimizer steps, each on other answers, between two generations."""
        raise NotImplementedError

    @property
    def num_iterations(self) -> int:
        """Passes over the answers of a generation."""
        raise NotImplementedError

    @property
    def num_cached_seqs(self) -> int:
        """Rows of the cache of a device that generates answers."""
        return self.max_num_seqs if isinstance(self.engine, NativeEngineConfig) else 0

    @property
    def column_readers(self) -> ColumnReaders:
        """Columns of rows that the rewards and the environment read."""
        return combine_readers(*self.rewards, self.environment)

    @property
    def num_prompts(self) -> int:
        """Prompts of a generation, over all devices."""
        return self.global_batch_size * self.steps_per_generation // self.num_generations

    @property
    def generation_summary(self) -> str:
        """Numbers of prompts, answers and steps of a generation."""
        prompts = f"{format_count(self.num_prompts, 'prompt')} x {format_count(self.num_generations, 'answer')}"
        steps = f"{format_count(self.steps_per_prompt, 'step')} of {format_count(self.global_batch_size, 'answer')}"
        return f"num_generations={self.num_generations}: a generation has {prompts} and {steps}"

    @property
    def steps_per_prompt(self) -> int:
        """Optimizer steps that train on the answers of a generation."""
        return self.steps_per_generation * self.num_iterations


def check_is_chat(key: str, data: PromptData) -> None:
    """Raise FieldError if prompts are plain texts, which environments cannot continue with messages."""
    for index, config in enumerate(MixtureBase.from_config(data).dataset_configs):
        if isinstance(config, PromptDataset) and config.prompt_format == "text":
            where = key if isinstance(data, PromptDataset) else f"{key}.datasets.{index}.dataset"
            problem = "must be auto or chat with an environment, whose turns need a chat template, got text"
            raise FieldError(f"{where}.prompt_format", problem)


def check_policy(cfg: PolicyConfig) -> None:
    """Raise UserError for everything that can be found without reading weights."""
    check_training(cfg)
    if cfg.environment is not None:
        cfg.environment.check(needs_reward=not cfg.rewards)
    for data in filter(None, (cfg.data, cfg.eval_data)):
        for columns in first_columns(data):
            check_rewards(cfg.rewards, columns)


def first_columns(data: PromptData) -> Iterator[list[str]]:
    """Names of the columns of the first row of each dataset in local files."""
    for config in MixtureBase.from_config(data).dataset_configs:
        if find_data_files(config.source, config.split) is None:
            continue  # on the Hub: the columns are checked when the rows are read
        rows = (config.apply_transforms(row.fields) for row in config.open_rows().rows if isinstance(row, Row))
        if (fields := next(filter(None, rows), None)) is not None and isinstance(config, PromptDataset):
            with suppress(UserError):  # an unusable row, which is reported when all rows are read
                yield [*config.read_prompt(fields).columns]

"""Batched generation for prompts from the command line or from a file, and training rows from the best answers.

tune run generate nano/generate 'prompts=["What is 3 plus 4?"]'
tune run generate nano/generate source=questions.jsonl output_path=answers.jsonl sampling.temperature=0.7
tune run generate nano/rejection_sampling output_format=preference output_path=pairs.jsonl
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunekit.checkpoint.atomic import check_writable, write_text_atomic
from tunekit.data.column_templates import Transform
from tunekit.data.readers.open_dataset import find_data_files
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.environments.config import EnvironmentChoice
from tunekit.errors import FieldError, check_range
from tunekit.evaluation.inference_config import InferenceConfig
from tunekit.generation.engine import GenerationEngine
from tunekit.generation.generate import generate_answers, log_cut_answers
from tunekit.loggers.progress import ProgressLogger
from tunekit.models.decoder import Decoder
from tunekit.rewards.base import ScoredRollout, check_rewards, combine_readers, gather_answers
from tunekit.rewards.config import RewardChoice
from tunekit.rewards.context import RewardContext
from tunekit.rewards.rejection_sampling import OutputFormat, select_rows, summarize_scores
from tunekit.rollouts.episode_log import episode_record
from tunekit.rollouts.episodes import generate_rollouts
from tunekit.rollouts.prompts import check_prompt_lengths, encode_prompts, make_dataset, open_prompts, read_prompts
from tunekit.rollouts.rollout import PromptRow

PROMPTS_PER_PASS = 256  # that a rank answers before rewards are computed
ENVIRONMENT_TOKENS = 1024  # space for the text and the tools of an environment in the prompt


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """The keys of this recipe."""

    prompts: tuple[str, ...] = ()  # User messages
    source: str | None = None  # Dataset with a column `prompt`, or with conversations, whose last answers are left out
    split: str = "train"  # Split of `source`
    transforms: tuple[Transform, ...] = ()  # Change or filter the rows of `source` first
    system_prompt: str | None = None  # System message
    apply_chat_template: bool = True  # Format prompts with the chat template; false: continue the text
    num_return_sequences: int = 1  # Answers to each prompt; several need sampling.temperature > 0
    max_num_seqs: int = 16  # Answers that a device generates at once
    output_path: str | None = None  # JSONL file with one line per answer; null: print them
    rewards: tuple[RewardChoice, ...] = ()  # Reward functions, whose weighted scores are added up
    environment: EnvironmentChoice | None = None  # Tools and turns; its reward is added. null: one answer to a prompt
    # Rows to write. `sft`: the best answer to each prompt; `preference`: the best and the worst one
    output_format: OutputFormat = "answers"
    min_reward: float | None = None  # Prompts whose best answer has a lower reward are left out; null: none
    episodes_path: str | None = None  # JSONL file with the tokens of all answers, for `tune episodes`; null: none
    # Most tokens of a prompt and its answer, with rewards or an environment; null: the longest prompt and
    # max_new_tokens, and 1,024 more for an environment. At most the context length of the model
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        make_dataset(self)  # raises FieldError
        check_range(self, "max_num_seqs", "num_return_sequences", "max_model_len", ge=1)
        if self.num_return_sequences > 1 and self.sampling.temperature == 0:
            raise FieldError("num_return_sequences", "greedy answers are equal. Set sampling.temperature.")
        self.check_selection()

    def check_selection(self) -> None:
        """Raise FieldError if there is nothing to select answers by, or nowhere to write them."""
        if self.output_format != "answers" and not self.has_rewards:
            raise FieldError("output_format", f"{self.output_format} needs rewards. Set rewards or environment.")
        if self.output_format != "answers" and self.output_path is None:
            raise FieldError("output_path", f"must be set with output_format={self.output_format}")
        if self.output_format == "preference" and self.num_return_sequences < 2:
            raise FieldError("num_return_sequences", "must be >= 2: a pair has two answers to the same prompt")
        if self.min_reward is not None and self.output_format == "answers":
            raise FieldError("min_reward", "selects rows of output_format=sft or preference. Set output_format.")
        if self.environment is not None and not self.apply_chat_template:
            raise FieldError("apply_chat_template", "must be true with an environment")
        if self.episodes_path is not None and not self.has_rewards:
            raise FieldError("episodes_path", "needs rewards. Set rewards or environment.")

    @property
    def has_rewards(self) -> bool:
        return bool(self.rewards) or self.environment is not None


CONFIG = GenerateConfig


def check(cfg: GenerateConfig) -> None:
    """Raise UserError if the model or the rows do not exist, or the prompts need a chat template and have none."""
    tokenizer = cfg.check_model(cfg.model)
    if cfg.apply_chat_template:
        tokenizer.template()  # raises UserError if there is none
    if cfg.source is not None:
        find_data_files(cfg.source, cfg.split)
    if cfg.environment is not None:
        cfg.environment.check(needs_reward=not cfg.rewards and cfg.output_format != "answers")
    if cfg.rewards:
        check_rewards(cfg.rewards, [*next((prompt.columns for _, prompt in read_prompts(cfg)), ())])


def main(cfg: GenerateConfig) -> None:
    """Generate the answers to all prompts, in their order, and write or print them."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as dist:
        cfg.parallel.check_inference(dist.world_size)
        for path in (Path(name) for name in (cfg.output_path, cfg.episodes_path) if name is not None):
            dist.run_on_main(partial(check_writable, path))
        model, tokenizer = cfg.load_model(cfg.model, dist)
        prompts = open_prompts(cfg, combine_readers(*cfg.rewards, cfg.environment), dist)
        rows = encode_prompts(cfg, prompts, tokenizer)
        check_prompt_lengths(rows, model.spec.context)
        if cfg.has_rewards:
            scored = sample_and_score(cfg, rows, model, tokenizer, dist)
            dist.run_on_main(partial(write_scored, cfg, tokenizer, scored))
            return
        indices = [index for index in range(len(rows)) for _ in range(cfg.num_return_sequences)]
        tokens = [rows[i].tokens for i in indices]
        answers = generate_answers(model, tokenizer, tokens, cfg.sampling, cfg.max_num_seqs, dist)
        lines = [{"prompt": prompts[i][1].value} | answer._asdict() for i, answer in zip(indices, answers, strict=True)]
        dist.run_on_main(partial(write_rows, cfg, lines, [f"{len(lines)} answers in {cfg.output_path}"]))


def sample_and_score(
    cfg: GenerateConfig, rows: Sequence[PromptRow], model: Decoder, tokenizer: Tokenizer, dist: DistributedContext
) -> list[ScoredRollout]:
    """Answers with rewards, on every rank, in the order of the prompts. Data parallel ranks share the prompts."""
    for reward in cfg.rewards:
        reward.prepare(dist)
    space = cfg.sampling.max_new_tokens + (0 if cfg.environment is None else ENVIRONMENT_TOKENS)
    length = min(cfg.max_model_len or max(len(row.tokens) for row in rows) + space, model.spec.context)
    engine = GenerationEngine(model, cfg.max_num_seqs, length, dist)
    share, num_samples, scored = range(dist.dp_rank, len(rows), dist.dims.dp_size), cfg.num_return_sequences, []
    with ProgressLogger("answering", len(share) * num_samples, "answer", dist.is_main_process) as progress:
        for first in range(0, len(rows), PROMPTS_PER_PASS * dist.dims.dp_size):
            start = first // dist.dims.dp_size
            prompts = {index: rows[index] for index in share[start : start + PROMPTS_PER_PASS]}
            options = cfg.sampling, cfg.environment, 0, progress
            generate = partial(generate_rollouts, engine, tokenizer, prompts, num_samples, *options)
            scored += gather_answers(cfg.rewards, dist.run_on_all(generate), RewardContext(), dist)[0]
            dist.heartbeat.record(first, "answer")
    log_cut_answers([item.rollout.is_cut_off_at(model.spec.context) for item in scored], model.spec.context, dist)
    return scored


def write_scored(cfg: GenerateConfig, tokenizer: Tokenizer, scored: Sequence[ScoredRollout]) -> None:
    """Write the episodes, and write the selected rows or print all answers with their rewards."""
    if cfg.episodes_path is not None:
        records = (episode_record(tokenizer, item.rollout, item.scores, item.reward) for item in scored)
        write_json_lines(cfg.episodes_path, records)
    rows = select_rows(scored, cfg.output_format, cfg.min_reward, not cfg.apply_chat_template)
    write_rows(cfg, rows, summarize_scores(scored, len(rows), cfg.output_path))


def write_rows(cfg: GenerateConfig, rows: Sequence[Mapping[str, Any]], summary: Iterable[str]) -> None:
    """Write rows to `output_path` and print a summary; without a path, print the rows, which are answers."""
    if cfg.output_path is not None:
        write_json_lines(cfg.output_path, rows)
        print("\n".join(summary))
    for row in rows if cfg.output_path is None else ():
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(f"> {prompt}\n{row['answer']}\n" + (f"reward {row['reward']}\n" if "reward" in row else ""))


def write_json_lines(path: str, rows: Iterable[Mapping[str, Any]]) -> None:
    write_text_atomic(Path(path), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

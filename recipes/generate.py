"""Batched generation for prompts from the command line or from a file, and training rows from the best answers.

tune run generate nano/generate 'prompts=["What is 3 plus 4?"]'
tune run generate nano/generate source=questions.jsonl output_path=answers.jsonl sampling.temperature=0.7
tune run generate nano/rejection_sampling output_format=preference output_path=pairs.jsonl
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tunekit.checkpoint.atomic import write_text_atomic
from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.chat_template.messages import Message, parse_messages, parse_tools
from tunekit.data.readers.open_dataset import find_data_files, open_dataset, parse_split
from tunekit.data.readers.row_reader import require_row
from tunekit.data.row_errors import with_row_location
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.environments.config import EnvironmentChoice
from tunekit.errors import FieldError, UserError
from tunekit.evaluation.inference_config import InferenceConfig
from tunekit.generation.counting_engine import CountingEngine
from tunekit.generation.generate import generate_texts
from tunekit.loggers.progress import ProgressLogger
from tunekit.models.decoder import Decoder
from tunekit.rewards.base import check_rewards
from tunekit.rewards.config import RewardChoice
from tunekit.rewards.rejection_sampling import OutputFormat, ScoredRollout, score_answers, select_rows, summarize
from tunekit.rollouts.episode_log import episode_record
from tunekit.rollouts.episodes import generate_rollouts
from tunekit.rollouts.rollout import PromptRow

PROMPTS_PER_PASS = 256  # that a rank answers before rewards are computed
ENVIRONMENT_TOKENS = 1024  # space for the text and the tools of an environment in the prompt


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(InferenceConfig):
    """The keys of this recipe."""

    prompts: tuple[str, ...] = ()  # User messages
    source: str | None = None  # Dataset with `messages` (up to the answer) or `prompt` columns
    split: str = "train"  # Split of `source`
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
    # max_new_tokens, and 1,024 more for an environment
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts and self.source is None:
            raise FieldError("prompts", "no prompts. Set prompts or source.")
        for key in ("max_num_seqs", "num_return_sequences", "max_model_len"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise FieldError(key, f"must be >= 1, got {value}")
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
        find_data_files(cfg.source, parse_split(cfg.split).name)
    if cfg.environment is not None:
        cfg.environment.check()
    if cfg.rewards:
        first = next(read_prompts(cfg), None)
        check_rewards(cfg.rewards, () if first is None else [*first.columns])


def main(cfg: GenerateConfig) -> None:
    """Generate the answers to all prompts, in their order."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as dist:
        cfg.parallel.check_inference(dist.world_size)
        model, tokenizer = cfg.load_model(cfg.model, dist)
        prompts = list(read_prompts(cfg))
        tokens = [encode_prompt(prompt, tokenizer, cfg) for prompt in prompts]
        if cfg.has_rewards:
            scored = sample_and_score(cfg, prompts, tokens, model, tokenizer, dist)
            dist.run_on_main(partial(write_rows, cfg, tokenizer, scored))
            return
        rows = [row for row in zip(prompts, tokens, strict=True) for _ in range(cfg.num_return_sequences)]
        answers = generate_texts(model, tokenizer, [ids for _, ids in rows], cfg.sampling, cfg.max_num_seqs, dist)
        lines = [{"prompt": row.value, "answer": answer} for (row, _), answer in zip(rows, answers, strict=True)]
        dist.run_on_main(partial(write_answers, cfg, lines))


class Prompt(NamedTuple):
    """A prompt as text, or as a list of messages, with its tools and the columns of its row."""

    where: str
    value: str | list
    tools: list | None
    columns: Mapping[str, Any]


def read_prompts(cfg: GenerateConfig) -> Iterator[Prompt]:
    """The prompts of the config, then those of the source."""
    yield from (Prompt(f"prompts.{index}", prompt, None, {}) for index, prompt in enumerate(cfg.prompts))
    for row in map(require_row, open_dataset(cfg.source, cfg.split, None).rows) if cfg.source is not None else ():
        prompt = row.fields.get("messages", row.fields.get("prompt"))
        if not isinstance(prompt, str | list) or not prompt:
            raise UserError(f"{row.where}: has no 'messages' or 'prompt'")
        tools = with_row_location(row, parse_tools, row.fields.get("tools"), "tools")
        value = prompt if isinstance(prompt, str) else with_row_location(row, parse_messages, prompt, "messages")
        yield Prompt(row.where, value, tools, {**expected_answer(value), **row.fields})


def expected_answer(prompt: str | list) -> Mapping[str, Any]:
    """The answer at the end of a conversation as a column for rewards; empty without one."""
    if isinstance(prompt, str) or prompt[-1].get("role") != "assistant":
        return {}
    return {"answer": prompt[-1].get("content")}


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, cfg: GenerateConfig) -> list[int]:
    """Token ids of a prompt, up to the start of the answer."""
    if is_text(prompt, cfg):
        return tokenizer.encode(str(prompt.value), special=True)
    return encode_conversation(tokenizer, prompt_messages(prompt.value, cfg), prompt.tools)


def is_text(prompt: Prompt, cfg: GenerateConfig) -> bool:
    """Whether the model continues a text."""
    return isinstance(prompt.value, str) and not cfg.apply_chat_template


def prompt_messages(prompt: str | list, cfg: GenerateConfig) -> list[Message]:
    """Messages of a prompt, without a final answer."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    system = [{"role": "system", "content": cfg.system_prompt}] if cfg.system_prompt else []
    return [*system, *messages]


def sample_and_score(  # noqa: PLR0913
    cfg: GenerateConfig,
    prompts: Sequence[Prompt],
    tokens: Sequence[Sequence[int]],
    model: Decoder,
    tokenizer: Tokenizer,
    dist: DistributedContext,
) -> list[ScoredRollout]:
    """Answers with rewards, on every rank, in the order of the prompts. Data parallel ranks share the prompts."""
    for reward in cfg.rewards:
        reward.prepare(dist)
    rows = [
        PromptRow(row.where, prompt_messages(row.value, cfg), ids, row.columns, row.tools, is_text(row, cfg))
        for row, ids in zip(prompts, tokens, strict=True)
    ]
    space = cfg.sampling.max_new_tokens + (0 if cfg.environment is None else ENVIRONMENT_TOKENS)
    length = cfg.max_model_len or max(map(len, tokens)) + space
    size = PROMPTS_PER_PASS * dist.dims.dp_size
    num_answers = len(range(dist.dp_rank, len(rows), dist.dims.dp_size)) * cfg.num_return_sequences
    scored: list[ScoredRollout] = []
    with ProgressLogger("answering", num_answers, "answer", dist.is_main_process) as progress:
        engine = CountingEngine(model, cfg.max_num_seqs, length, dist, progress)
        for first in range(0, len(rows), size):
            local = range(first + dist.dp_rank, min(first + size, len(rows)), dist.dims.dp_size)
            share = {i: rows[i] for i in local}
            generate = partial(
                generate_rollouts, engine, tokenizer, share, cfg.num_return_sequences, cfg.sampling, cfg.environment, 0
            )
            rollouts = dist.run_on_all(generate)
            if dist.rank % (dist.dims.cp * dist.dims.tp):
                rollouts = []  # CP and TP ranks have the same ones: those of the first rank count
            results = dist.all_gather_objects(dist.run_on_all(partial(score_answers, cfg.rewards, rollouts)))
            scored += sorted(chain(*results), key=lambda item: item.rollout.group)
            dist.heartbeat.record(first, "answer")
    return scored


def write_rows(cfg: GenerateConfig, tokenizer: Tokenizer, scored: Sequence[ScoredRollout]) -> None:
    """Write the episodes and the selected rows, or print all answers with their rewards."""
    if cfg.episodes_path is not None:
        records = (episode_record(tokenizer, item.rollout, item.scores, item.reward) for item in scored)
        write_text_atomic(Path(cfg.episodes_path), "".join(map(json_line, records)))
    rows = select_rows(scored, cfg.output_format, cfg.min_reward, not cfg.apply_chat_template)
    if cfg.output_path is None:
        for row in rows:
            print(f"> {row['prompt'][-1]['content']}\n{row['answer']}\nreward {row['reward']}\n")
        return
    write_text_atomic(Path(cfg.output_path), "".join(map(json_line, rows)))
    print("\n".join(summarize(scored, len(rows), cfg.output_path)))


def json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def write_answers(cfg: GenerateConfig, lines: list[dict]) -> None:
    if cfg.output_path is not None:
        write_text_atomic(Path(cfg.output_path), "".join(map(json_line, lines)))
        print(f"{len(lines)} answers in {cfg.output_path}")
        return
    for line in lines:
        prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
        print(f"> {prompt}\n{line['answer']}\n")

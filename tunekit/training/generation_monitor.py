"""Answers of the model in training to some prompts, and how many of them pass checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.mixture import SFTData, is_streaming
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, UserError
from tunekit.evaluation.answer_checks import AnswerChecks
from tunekit.evaluation.generation_eval import iter_questions, with_source
from tunekit.generation.generate import generate_texts
from tunekit.generation.sampling import SamplingConfig
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.models.decoder import Decoder
from tunekit.models.spec import DecoderSpec

ANSWER_METRICS = {"exact_match": "data", "regex_match": "regex", "json_schema_match": "json_schema"}  # and their keys


@dataclass(frozen=True)
class GenerationEvalConfig:
    """Answers that the model in training generates at each evaluation, kept in `completions.jsonl`.

    The metrics `exact_match`, `regex_match` and `json_schema_match` are fractions of the answers.
    """

    kind: ClassVar[str] = "generation_eval"
    prompts: tuple[str, ...] = ()  # User messages to answer
    data: SFTData | None = None  # Held-out rows whose last answers are generated; `max_samples` limits them
    sampling: SamplingConfig = SamplingConfig()  # How answers are generated
    batch_size: int = 16  # Answers per forward pass
    # Regular expression that an answer must contain; the groups of its last match must be those in the expected answer
    regex: str | None = None
    json_schema: str | None = None  # JSON file; answers must be JSON that this schema allows. Needs package jsonschema
    num_completions_to_print: int = 3  # Number of answers to print

    def __post_init__(self) -> None:
        if not self.prompts and self.data is None:
            raise FieldError("prompts", "nothing to answer. Set prompts or data.")
        if self.batch_size < 1:
            raise FieldError("batch_size", f"must be >= 1, got {self.batch_size}")
        if self.data is not None and is_streaming(self.data):
            raise FieldError("data", "cannot be streamed. Set streaming=false; max_samples limits the rows.")
        assert self.checks is not None  # its own checks

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics; empty if answers are only shown."""
        return [name for name, key in ANSWER_METRICS.items() if getattr(self, key) is not None]

    @cached_property
    def checks(self) -> AnswerChecks:
        return AnswerChecks(self.regex, self.json_schema, "generation_eval.")

    def check(self, spec: DecoderSpec, tokenizer: Tokenizer) -> None:
        """Raise UserError if the model cannot answer, or the rows or the schema do not exist. Reads no rows."""
        if spec.score is not None:
            raise UserError("generation_eval: needs a language model, and this model has a score head. Remove it.")
        assert (self.checks.validator is None) == (self.json_schema is None)  # raises UserError
        if self.prompts:
            tokenizer.template()  # raises UserError if there is none
        if self.data is not None:
            self.data.check_source()
            self.data.prepare_tokenizer(tokenizer)


class GenerationEvalOptions(Protocol):
    """The config keys that `GenerationMonitor` reads."""

    @property
    def generation_eval(self) -> GenerationEvalConfig | None: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...


class PromptToAnswer(NamedTuple):
    """Token ids of a prompt, its text, and the expected answer, if there is one."""

    tokens: list[int]
    text: str
    expected: str | None


class GenerationMonitor:
    """Answers the prompts of `generation_eval`. Without a config it does nothing."""

    def __init__(
        self, cfg: GenerationEvalOptions, tokenizer: Tokenizer, dist: DistributedContext, run_dir: Path, overwrite: bool
    ) -> None:
        self.config, self.tokenizer, self.dist = cfg.generation_eval, tokenizer, dist
        self.prompts: list[PromptToAnswer] = []
        if self.config is None:
            return
        for text in self.config.prompts:
            tokens = encode_conversation(tokenizer, [{"role": "user", "content": text}])
            self.prompts.append(PromptToAnswer(tokens, text, None))
        if self.config.data is not None:
            sizes = cfg.global_batch_size, cfg.micro_batch_size
            data = self.config.data, tokenizer, *sizes, dist, run_dir / "generation_eval", overwrite
            self.prompts += list(find_prompts(*data))

    def evaluate(self, model: Decoder, step: int, logger: MetricLogger) -> dict[str, float]:
        """Generate and log an answer to each prompt. Returns the metrics. Draws from no global generator."""
        if self.config is None:
            return {}
        was_training, prompts = model.training, [prompt.tokens for prompt in self.prompts]
        options = self.config.sampling, self.config.batch_size, self.dist
        answers = [text.strip() for text in generate_texts(model, self.tokenizer, prompts, *options)]
        model.train(was_training)
        pairs = list(zip(self.prompts, answers, strict=True))
        scores = [self.config.checks.scores(answer, prompt.expected) for prompt, answer in pairs]
        rows = [{"prompt": prompt.text, "completion": answer, "expected": prompt.expected} for prompt, answer in pairs]
        names = dict.fromkeys(name for score in scores for name in score)
        rows = [row | {name: score.get(name) for name in names} for row, score in zip(rows, scores, strict=True)]
        logger.log_completions(step, rows, self.config.num_completions_to_print)
        values = {name: [score[name] for score in scores if name in score] for name in names}
        return {name: sum(passed) / len(passed) for name, passed in values.items()}


def find_prompts(data: SFTData, tokenizer: Tokenizer, *loader_options) -> Iterator[PromptToAnswer]:
    """The rows of a dataset up to their last answers. Raises UserError if no row has one."""
    loader = build_dataloader(data, tokenizer, *loader_options)
    questions = list(iter_questions(with_source(loader.datasets), tokenizer))
    if not questions:
        raise UserError("generation_eval.data: no row has an answer after a prompt. Use rows with conversations.")
    yield from (PromptToAnswer(question.prompt, question.text, question.expected) for question in questions)

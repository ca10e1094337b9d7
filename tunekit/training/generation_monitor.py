"""Answers of the model in training to some prompts, and how many of them pass checks."""

from typing import NamedTuple

from tunekit.data.chat_template.chat_format import encode_conversation
from tunekit.data.dataloader.base import DataLoader
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError
from tunekit.evaluation.evaluation_rows import iter_questions, read_rows
from tunekit.generation.generate import check_prompt_length, generate_answers
from tunekit.loggers.metric_logger import MetricLogger
from tunekit.models.decoder import Decoder
from tunekit.training.data_checks import check_columns
from tunekit.training.run_context import RunContext
from tunekit.training.setup import open_dataloader


class PromptToAnswer(NamedTuple):
    """Token ids of a prompt, its text, and the expected answer, if there is one."""

    tokens: list[int]
    text: str
    expected: str | None


class GenerationMonitor:
    """Answers the prompts of `generation_eval`. Without a config it does nothing."""

    def __init__(self, tokenizer: Tokenizer, run: RunContext) -> None:
        self.config, self.tokenizer, self.dist = run.cfg.generation_eval, tokenizer, run.dist
        self.prompts: list[PromptToAnswer] = []
        if self.config is None:
            return
        for index, text in enumerate(self.config.prompts):
            tokens = encode_conversation(tokenizer, [{"role": "user", "content": text}])
            check_prompt_length(f"generation_eval.prompts.{index}", len(tokens), tokenizer.max_position_embeddings)
            self.prompts.append(PromptToAnswer(tokens, text, None))
        if self.config.data is not None:
            rows = open_dataloader(self.config.data, tokenizer, run, "generation_eval")
            check_columns(run.cfg, "generation_eval.data", rows, run.dist)
            self.prompts += find_prompts(rows, tokenizer)

    def evaluate(self, model: Decoder, step: int, logger: MetricLogger) -> dict[str, float]:
        """Generate and log an answer to each prompt. Returns the metrics. Draws from no global generator."""
        if self.config is None:
            return {}
        self.dist.heartbeat.record(step, "validate")
        prompts, options = [prompt.tokens for prompt in self.prompts], (self.config.sampling, self.config.batch_size)
        answers = [text.strip() for text, _ in generate_answers(model, self.tokenizer, prompts, *options, self.dist)]
        pairs = list(zip(self.prompts, answers, strict=True))
        scores = [self.config.checks.scores(answer, prompt.expected) for prompt, answer in pairs]
        rows = [{"prompt": prompt.text, "completion": answer, "expected": prompt.expected} for prompt, answer in pairs]
        names = dict.fromkeys(name for score in scores for name in score)
        rows = [row | {name: score.get(name) for name in names} for row, score in zip(rows, scores, strict=True)]
        logger.log_completions(step, rows, self.config.num_completions_to_print)
        values = {name: [score[name] for score in scores if name in score] for name in names}
        return {name: sum(passed) / len(passed) for name, passed in values.items()}


def find_prompts(loader: DataLoader, tokenizer: Tokenizer) -> list[PromptToAnswer]:
    """The rows of a dataset up to their last answers. Raises UserError if no row has one."""
    questions = [*iter_questions(read_rows(loader, tokenizer), tokenizer)]
    for question in questions:
        check_prompt_length(question.row, len(question.prompt), tokenizer.max_position_embeddings)
    prompts = [PromptToAnswer(question.prompt, question.text, question.expected) for question in questions]
    if not prompts:
        raise UserError("generation_eval.data: no row has an answer after a prompt. Use rows with conversations.")
    return prompts

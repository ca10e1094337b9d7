"""Evaluation: loss and answers on held-out rows, tasks by name, and the significance of differences to a baseline.

tune run evaluate nano/tools
tune run evaluate nano/tools model=runs/nano-tools baseline=tunekit/nano data.split=test num_completions_to_print=10
tune run evaluate nano/known tasks=[nano,arc_easy] limit=100
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tunekit.checkpoint.atomic import check_writable, write_text_atomic
from tunekit.data.dataloader.build import build_dataloader
from tunekit.data.dataloader.mixture import SFTData, dataset_title, is_streaming
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import FieldError, check_range
from tunekit.evaluation.answer_checks import AnswerChecks
from tunekit.evaluation.evaluation_rows import Question, read_rows
from tunekit.evaluation.generation_eval import GenerationEvaluator
from tunekit.evaluation.inference_config import InferenceConfig
from tunekit.evaluation.results import ModelResult
from tunekit.evaluation.significance import PairedDifference, paired_differences
from tunekit.evaluation.table import results_table
from tunekit.evaluation.tasks import TaskSelection
from tunekit.models.decoder import Decoder
from tunekit.publishing import model_card
from tunekit.training import data_checks


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(InferenceConfig):
    """The keys of this recipe. Those of the model are also those of `baseline`."""

    baseline: str | None = None  # A second model to compare with, such as the one before training
    data: SFTData | None = None  # Held-out rows; the last target message of each is the expected answer
    # Regular expression that an answer to `data` must contain; the groups of its last match must be those in the row
    regex: str | None = None
    json_schema: str | None = None  # JSON file; answers must be JSON that this schema allows. Needs package jsonschema
    tasks: tuple[
        str, ...
    ] = ()  # `nano`, `nano/facts`, ...; or lm-evaluation-harness tasks such as `[arc_easy, hellaswag]`
    num_fewshot: int | None = None  # Few-shot examples per question; null: as the task defines
    include_path: str | None = None  # Directory with your own lm-evaluation-harness tasks; their code is executed
    apply_chat_template: bool = False  # Format harness questions with the chat template
    limit: int | None = None  # First N rows of `data` and of each task
    batch_size: int = 32  # Rows per forward pass
    num_completions_to_print: int = 3  # Number of answers to print
    output_path: str | None = None  # JSON file for the results

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "batch_size", ge=1)
        if self.data is None and not self.tasks:
            raise FieldError("data", "nothing to evaluate. Set data or tasks.")
        if self.data is not None and is_streaming(self.data):
            raise FieldError("data", "cannot be streamed. Set streaming=false; limit sets the number of rows.")
        assert self.named is not None and self.checks is not None  # their own checks

    @property
    def checks(self) -> AnswerChecks:
        return AnswerChecks(self.regex, self.json_schema)

    @property
    def named(self) -> TaskSelection:
        return TaskSelection(self.tasks, self.num_fewshot, self.include_path, self.limit, self.apply_chat_template)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer of the rows. Reads no weights."""
        return self.check_model(self.model)


CONFIG = EvaluateConfig


def check(cfg: EvaluateConfig) -> None:
    """Raise UserError if a model, the rows or a task do not exist."""
    for name in filter(None, (cfg.model, cfg.baseline)):
        tokenizer = cfg.check_model(name)
        if cfg.data is not None:
            cfg.data.prepare_tokenizer(tokenizer)
    if cfg.data is not None:
        cfg.data.check_source()
    cfg.named.check()
    assert (cfg.checks.validator is None) == (cfg.json_schema is None)  # raises UserError


def main(cfg: EvaluateConfig) -> list[ModelResult]:
    """Evaluate each model and print the results."""
    with DistributedContext(cfg.sampling.seed, cfg.device, cfg.parallel) as dist:
        cfg.parallel.check_inference(dist.world_size)
        if cfg.output_path is not None:
            dist.run_on_main(partial(check_writable, Path(cfg.output_path)))
        results, questions = [], []
        for name in filter(None, (cfg.baseline, cfg.model)):
            questions, result = evaluate_model(name, cfg, dist)
            results.append(result)
        dist.run_on_main(partial(report_results, cfg, questions, results))
    return results


def evaluate_model(name: str, cfg: EvaluateConfig, dist: DistributedContext) -> tuple[list[Question], ModelResult]:
    """Questions of the rows, and the results of one model, which is freed afterwards."""
    tasks = cfg.named.load()  # before weights are read: some tasks are downloaded
    return evaluate_loaded(name, *cfg.load_model(name, dist), tasks, cfg, dist)


def evaluate_loaded(
    name: str, model: Decoder, tokenizer: Tokenizer, tasks: Any, cfg: EvaluateConfig, dist: DistributedContext
) -> tuple[list[Question], ModelResult]:
    """Questions of the rows, and the results of a model in memory. `tasks` are the loaded ones of `cfg.named`."""
    evaluator = GenerationEvaluator(model, tokenizer, cfg.sampling, cfg.batch_size, dist)
    questions, results = [], []
    if cfg.data is not None:
        data = build_dataloader(cfg.data, tokenizer, cfg.batch_size, cfg.batch_size, dist)
        data.check_vocab(model.spec.vocab)
        if name == cfg.model:
            data_checks.warn_data(cfg, data, tokenizer, dist)
        rows = read_rows(data, tokenizer, cfg.limit)
        questions, result = evaluator(dataset_title(cfg.data), rows, cfg.checks)
        results.append(result)
    return questions, ModelResult(name, (*results, *cfg.named.evaluate(evaluator, name, tasks)))


def report_results(cfg: EvaluateConfig, questions: list[Question], results: list[ModelResult]) -> None:
    """Print the results, and write them to `output_path` and the model card."""
    changed = paired_differences(results[0], results[-1], cfg.sampling.seed) if cfg.baseline is not None else []
    print_completions(questions, results, cfg.num_completions_to_print)
    print(results_table(results, changed))
    write_results(cfg, results, changed)
    if cfg.data is not None:
        metrics = [
            {"model": result.model, "loss": result.loss, "perplexity": result.perplexity, "correct": result.num_correct}
            for result in results
        ]
        model_card.add_evaluation(Path(cfg.model), dataset_title(cfg.data), metrics, len(questions))


def write_results(cfg: EvaluateConfig, results: list[ModelResult], changed: list[PairedDifference]) -> None:
    """Write the results to `output_path`, if it is set."""
    if cfg.output_path is not None:
        models = [result.to_dict() for result in results]
        content = {"models": models, "changes": [asdict(change) for change in changed]}
        write_text_atomic(Path(cfg.output_path), json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def print_completions(questions: list[Question], results: list[ModelResult], examples: int) -> None:
    """Print the answers to the first questions."""
    width = max(len(name) for name in ("question", *(result.model for result in results)))
    for i, question in enumerate(questions[:examples]):
        lines = {"question": question.text, "expected": question.expected}
        for name, text in {**lines, **{result.model: result.answers[i] for result in results}}.items():
            print(f"{name:{width}}  {text}")
        print()

"""Evaluation on dataset rows: loss of the target tokens, and exact_match of the last answer in each row."""

from collections.abc import Iterable
from dataclasses import dataclass

from tunekit.data.document import Document
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.evaluation.answer_checks import AnswerChecks
from tunekit.evaluation.evaluation_rows import EvaluationRow, Question, iter_questions
from tunekit.evaluation.loglikelihood import LoglikelihoodRequest, score_rows
from tunekit.evaluation.results import Metric, TaskResult
from tunekit.generation.generate import check_prompt_length, generate_answers
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder

EXACT_MATCH = AnswerChecks()


@dataclass(frozen=True)
class GenerationEvaluator:
    """A model with its sampling settings. Calling it evaluates a task."""

    model: Decoder
    tokenizer: Tokenizer
    sampling: SamplingConfig
    batch_size: int  # rows in one forward pass
    dist: DistributedContext

    def __call__(
        self, task: str, rows: Iterable[EvaluationRow], checks: AnswerChecks = EXACT_MATCH
    ) -> tuple[list[Question], TaskResult]:
        """Questions and metrics of a task. Metrics that no row contributes to are left out."""
        rows = list(rows)
        metrics = self.loss_metrics(rows)
        questions = list(iter_questions(rows, self.tokenizer))
        prompts = [question.prompt for question in questions]
        for question in questions:
            check_prompt_length(question.row, len(question.prompt), self.model.spec.context)
        answers = generate_answers(self.model, self.tokenizer, prompts, self.sampling, self.batch_size, self.dist)
        completions = tuple(text.strip() for text, _ in answers)
        if questions:
            pairs, locations = zip(completions, questions, strict=True), [question.row for question in questions]
            scores = [checks.scores(text, question.expected) for text, question in pairs]
            for name in scores[0]:
                metrics.append(Metric.mean(name, [float(score[name]) for score in scores], rows=locations))
        return questions, TaskResult(task, tuple(metrics), completions)

    def loss_metrics(self, rows: Iterable[EvaluationRow]) -> list[Metric]:
        """Loss per target token; empty if there are no target tokens."""
        names: list[str] = []
        scored: list[LoglikelihoodRequest] = []
        for row, document, _ in rows:
            if positions := target_positions(document):
                names.append(row)
                scored.append(LoglikelihoodRequest(document.tokens.tolist(), positions))
        losses = [-score.logprob for score in score_rows(self.model, scored, self.batch_size, self.dist)]
        weights = [float(len(tokens.positions)) for tokens in scored]
        return [Metric.mean("loss", losses, weights, False, names)] if scored else []


def target_positions(document: Document) -> list[int]:
    """Positions of target tokens, except position 0, which has no context to predict it from."""
    return [position for position in document.loss_mask.nonzero()[0].tolist() if position]

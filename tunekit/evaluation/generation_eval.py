"""Evaluation on dataset rows: loss of the target tokens, and exact_match of the last answer in each row."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.evaluation.answer_checks import AnswerChecks
from tunekit.evaluation.loglikelihood import ScoredTokens, score_rows
from tunekit.evaluation.results import Metric, TaskResult
from tunekit.generation.generate import check_prompt_length, generate_answers
from tunekit.generation.sampling import SamplingConfig
from tunekit.models.decoder import Decoder

EXACT_MATCH = AnswerChecks()
LocatedDocument = tuple[str, Document]  # file and row of a document, and the document


class Question(NamedTuple):
    """Location of a row, its tokens before the last answer, the same as text, and the expected answer."""

    row: str
    prompt: list[int]
    text: str
    expected: str


@dataclass(frozen=True)
class GenerationEvaluator:
    """A model with its sampling settings. Calling it evaluates a task."""

    model: Decoder
    tokenizer: Tokenizer
    sampling: SamplingConfig
    batch_size: int  # rows in one forward pass
    dist: DistributedContext

    def __call__(
        self, task: str, rows: Iterable[LocatedDocument], checks: AnswerChecks = EXACT_MATCH
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

    def loss_metrics(self, rows: Iterable[LocatedDocument]) -> list[Metric]:
        """Loss per target token; empty if there are no target tokens."""
        names: list[str] = []
        scored: list[ScoredTokens] = []
        for row, document in rows:
            if positions := target_positions(document):
                names.append(row)
                scored.append(ScoredTokens(document.tokens.tolist(), positions))
        losses = [-score.logprob for score in score_rows(self.model, scored, self.batch_size, self.dist)]
        weights = [float(len(tokens.positions)) for tokens in scored]
        return [Metric.mean("loss", losses, weights, False, names)] if scored else []


def with_source(parts: Iterable[TokenizedDataset]) -> Iterator[LocatedDocument]:
    """All documents, each with its file and row."""
    for dataset in parts:
        yield from ((dataset.row_location(number), dataset[number]) for number in range(len(dataset)))


def target_positions(document: Document) -> list[int]:
    """Positions of target tokens, except position 0, which has no context to predict it from."""
    return [position for position in document.loss_mask.nonzero()[0].tolist() if position]


def iter_questions(rows: Iterable[LocatedDocument], tokenizer: Tokenizer) -> Iterator[Question]:
    """The last answer of each row. Truncated or split rows, and plain text, which has no prompt, are skipped."""
    for row, document in rows:
        start, is_truncated = answer_start(document), len(document.tokens) < document.full_length
        if start > 0 and not is_truncated and not document.doc_flags & DocFlags.SPLIT:
            prompt, answer = (
                document.tokens[:start].tolist(),
                document.tokens[start:][document.loss_mask[start:]].tolist(),
            )
            yield Question(row, prompt, tokenizer.decode(prompt).strip(), tokenizer.decode(answer).strip())


def answer_start(document: Document) -> int:
    """Position of the first token of the last run of target tokens; 0 without target tokens."""
    positions = document.loss_mask.nonzero()[0]
    if not len(positions):
        return 0
    gaps = (positions[1:] - positions[:-1] > 1).nonzero()[0]
    return int(positions[gaps[-1] + 1] if len(gaps) else positions[0])

"""Rows as questions: the loss of their learnt tokens, and whether the last answer of each is right to the letter."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tunekit.data.doc_flags import DocFlags
from tunekit.data.preprocess.tokenized_dataset import Document, TokenizedDataset
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.evaluation.loglikelihood import ScoredTokens, score_rows
from tunekit.evaluation.results import Metric, TaskResult
from tunekit.generation.generate import SamplingConfig, generate_all
from tunekit.models.decoder import Decoder

Placed = tuple[str, Document]  # where a document is from, and itself


class Question(NamedTuple):
    """Where a row is from, its tokens up to an answer, and the answer as text."""

    row: str
    prompt: list[int]
    text: str
    wanted: str


@dataclass(frozen=True)
class GenerationEvaluator:
    """A model that is asked, and how."""

    model: Decoder
    tokenizer: Tokenizer
    sampling: SamplingConfig
    batch: int  # rows in one pass
    run: DistributedContext

    def __call__(self, task: str, rows: Iterable[Placed]) -> tuple[list[Question], TaskResult]:
        """What it makes of the rows of a task. A figure of no row is none."""
        rows = list(rows)
        told = [(row, ScoredTokens(document.tokens.tolist(), at)) for row, document in rows if (at := learnt(document))]
        names, given = [row for row, _ in told], [one for _, one in told]
        losses = [-score.logprob for score in score_rows(self.model, given, self.batch, self.run)]
        questions = list(asked(rows, self.tokenizer))
        prompts = [question.prompt for question in questions]
        made = generate_all(self.model, prompts, self.sampling, self.tokenizer.stops, self.batch, self.run)
        texts = tuple(self.tokenizer.decode(tokens).strip() for tokens in made)
        right = [float(answer == question.wanted) for answer, question in zip(texts, questions, strict=True)]
        weights = [float(len(one.at)) for one in given]
        figures = [Metric.mean("loss", losses, weights, False, names)] if losses else []
        figures += [Metric.mean("exact match", right, rows=[question.row for question in questions])] if right else []
        return questions, TaskResult(task, tuple(figures), texts)


def with_source(parts: Iterable[TokenizedDataset]) -> Iterator[Placed]:
    """All documents, each with the file and row that it is from."""
    for part in parts:
        yield from ((part.where(number), part[number]) for number in range(len(part)))


def learnt(document: Document) -> list[int]:
    """The places of learnt tokens. Nothing stands before the first token of all, so nothing says how likely it is."""
    return [place for place in document.learnt.nonzero()[0].tolist() if place]


def asked(rows: Iterable[Placed], tokenizer: Tokenizer) -> Iterator[Question]:
    """The last answer of each row. A row that was cut or split, or is learnt from its beginning as text is, asks
    nothing."""
    for row, document in rows:
        first, cut = start_of_answer(document), len(document.tokens) < document.whole
        if first > 0 and not cut and not document.signs & DocFlags.PART:
            prompt, answer = document.tokens[:first].tolist(), document.tokens[first:][document.learnt[first:]].tolist()
            yield Question(row, prompt, tokenizer.decode(prompt).strip(), tokenizer.decode(answer).strip())


def start_of_answer(document: Document) -> int:
    """Where the last run of learnt tokens begins; 0 if there is none."""
    learnt = document.learnt.nonzero()[0]
    if not len(learnt):
        return 0
    breaks = (learnt[1:] - learnt[:-1] > 1).nonzero()[0]
    return int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0])

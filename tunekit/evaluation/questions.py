"""Rows as questions: the loss of their learnt tokens, and whether the last answer of each is right to the letter."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tunekit.data.prepared.documents import Document
from tunekit.data.tokenizer import Tokenizer
from tunekit.evaluation.figures import Figure, Found
from tunekit.evaluation.scores import Given, scored
from tunekit.generate import Sampling, answers
from tunekit.models.decoder import Decoder
from tunekit.parallel.run import Run


class Question(NamedTuple):
    """Tokens up to an answer, and the answer as text."""

    prompt: list[int]
    text: str
    wanted: str


@dataclass(frozen=True)
class Asker:
    """A model that is asked, and how."""

    model: Decoder
    tokenizer: Tokenizer
    sampling: Sampling
    batch: int  # rows in one pass
    run: Run

    def __call__(self, task: str, documents: Iterable[Document]) -> tuple[list[Question], Found]:
        """What it makes of the rows of a task."""
        documents = list(documents)
        given = [Given(document.tokens.tolist(), at) for document in documents if (at := learnt(document))]
        losses = [-score.logprob for score in scored(self.model, given, self.batch, self.run)]
        questions = list(asked(documents, self.tokenizer))
        prompts = [question.prompt for question in questions]
        made = answers(self.model, prompts, self.sampling, self.tokenizer.stops, self.batch, self.run)
        texts = tuple(self.tokenizer.decode(tokens).strip() for tokens in made)
        right = [float(answer == question.wanted) for answer, question in zip(texts, questions, strict=True)]
        figures = [Figure.mean("loss", losses, [float(len(row.at)) for row in given], higher=False)]
        figures += [Figure.mean("exact match", right)] if right else []
        return questions, Found(task, tuple(figures), texts)


def learnt(document: Document) -> list[int]:
    """The places of learnt tokens. Nothing stands before the first token of all, so nothing says how likely it is."""
    return [place for place in document.learnt.nonzero()[0].tolist() if place]


def asked(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Question]:
    """The last answer of each row. A row that was cut, or is learnt from its beginning as text is, asks nothing."""
    for document in documents:
        first = start_of_answer(document)
        if first > 0 and len(document.tokens) == document.whole:
            prompt, answer = document.tokens[:first].tolist(), document.tokens[first:][document.learnt[first:]].tolist()
            yield Question(prompt, tokenizer.decode(prompt).strip(), tokenizer.decode(answer).strip())


def start_of_answer(document: Document) -> int:
    """Where the last run of learnt tokens begins."""
    learnt = document.learnt.nonzero()[0]
    breaks = (learnt[1:] - learnt[:-1] > 1).nonzero()[0]
    return int(learnt[breaks[-1] + 1] if len(breaks) else learnt[0])

"""Tasks of EleutherAI's lm-evaluation-harness on our decoder, as it is: no conversion. It needs the extra `harness`."""

import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tunekit.config.suggestions import closest_match
from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError
from tunekit.evaluation.loglikelihood import ScoredTokens, score_rows
from tunekit.evaluation.results import Metric, TaskResult
from tunekit.generation.generate import SamplingConfig, generate_all
from tunekit.hub import errors
from tunekit.models.decoder import Decoder

NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}  # what changes nothing may be said
FEW = 60  # characters of each text of a request that a message shows
SHOWN = 300  # characters of what went wrong
LONGEST = 256  # tokens of an answer where a task says nothing, as the harness has it
MISTAKES = (*errors.TROUBLE, LookupError, TypeError, ImportError)  # of files of tasks, and of sets that are not here


class LMEvalAdapter(TemplateLM):
    """What the harness asks, answered by a decoder. Each rank is asked all of it, and they share the work."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, batch: int, run: DistributedContext, name: str) -> None:
        super().__init__()
        self.model, self.words, self.batch, self.run, self.name = model, tokenizer, batch, run, name
        self.max_length, self._device = model.spec.context, run.device

    @property
    def eot_token_id(self) -> int:
        if self.words.eos is None:
            raise UserError(f"{self.name}: its tokenizer names no end-of-text token, which these tasks need")
        return self.words.eos

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing stands before."""
        return self.eot_token_id if self.words.bos is None else self.words.bos

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Ids of a text. A beginning that is written out, as templates do, is not put there twice."""
        begun = string.startswith(self.words.decode([self.prefix_token_id], special=True))
        return self.words.encode(string, special=not begun if add_special_tokens is None else add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.words.templates["default"][0] if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the checkpoint's template writes it; or up to the last word of its last message."""
        messages = detect_features(self.words.template(), self.words).fit(chat_history)
        text = self.words.render(messages, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations. UserError where there is nothing to score, or nothing to score it by."""
        told = [(request.args, *self.split(*request.args)) for request in requests]
        for request, (_, context, continuation) in zip(requests, told, strict=True):
            self.insist(request, len(context), len(continuation))
        return self._loglikelihood_tokens(told)

    def split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Their tokens. What nothing stands before is seen from the token with which texts begin."""
        if context:
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        begun = tokens[:1] == [self.prefix_token_id]
        return [self.prefix_token_id], tokens[1:] if begun else tokens

    def insist(self, request: Instance, context: int, continuation: int) -> None:
        """UserError, with the row of its task, for a request of so many tokens that has no likelihood."""
        if context and 0 < continuation <= self.max_length:
            return
        if not context:
            fault = "its context has no token, by which the continuation could be scored"
        elif not continuation:
            fault = "nothing to score: its continuation has no token"
        else:
            fault = f"{continuation} tokens of a continuation, and the model was made for {self.max_length}"
        texts = ", ".join(repr(text if len(text) <= FEW else f"{text[:FEW]}...") for text in request.args)
        told = f"tasks: row {request.doc_id} of {request.task_name or 'a task'} ({texts}): {fault}"
        raise UserError(f"{told}: mend the row, or doc_to_text and doc_to_choice of the task")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether each is what the model would say."""
        rows = []
        for _texts, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            rows.append(ScoredTokens(tokens, range(max(1, len(tokens) - len(continuation)), len(tokens))))
        return list(score_rows(self.model, rows, self.batch, self.run))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of whole texts, of which long ones are read in windows that score each token once."""
        windows: list[Any] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for part in map(make_disjoint_window, parts):
                windows.append((None, *part))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += logprob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers up to a stop string. Requests that are answered in the same way share passes, the longest first."""
        asked = [cast("tuple[str, dict[str, Any]]", request.args) for request in requests]
        prompts, ways = [self.tok_encode(text) for text, _ in asked], [RequestHandler.of(how) for _, how in asked]
        for request, prompt in zip(requests, prompts, strict=True):
            if not prompt:
                told = f"row {request.doc_id} of {request.task_name or 'a task'} asks nothing: its prompt has no token"
                raise UserError(f"tasks: {told}: mend the row, or doc_to_text of the task")
        order = sorted(range(len(requests)), key=lambda i: (repr(ways[i]), -len(prompts[i])))
        found: dict[int, str] = {}
        for way, group in groupby(order, key=lambda i: ways[i]):
            numbers = list(group)
            found.update(zip(numbers, self.answered(way, [prompts[i] for i in numbers]), strict=True))
        return [found[i] for i in range(len(requests))]

    def answered(self, way: "RequestHandler", prompts: list[list[int]]) -> list[str]:
        room = self.max_length - way.sampling.tokens
        if room < 1:
            told = f"{way.sampling.tokens} tokens for an answer, and the model was made for {self.max_length} in all"
            raise UserError(f"tasks: they ask for {told}: write a task of your own with a smaller max_gen_toks")
        texts, tail = list(way.until), max((len(text.encode()) for text in way.until), default=0) + 4
        stops = self.words.stops | {token for token, text in self.words.marks.items() if text in texts}

        def ended(answer: Sequence[int]) -> bool:
            said = self.words.decode(answer[-tail:]) if texts else ""
            return any(text in said for text in texts)

        prompts = [prompt[-room:] for prompt in prompts]
        made = generate_all(self.model, prompts, way.sampling, stops, self.batch, self.run, ended)
        return [cut(self.words.decode(answer), texts) for answer in made]


@dataclass(frozen=True)
class RequestHandler:
    """How requests are answered."""

    sampling: SamplingConfig
    until: tuple[str, ...]

    @staticmethod
    def of(given: Mapping[str, Any]) -> "RequestHandler":
        """From what a task says (`generation_kwargs`)."""
        said: dict[str, Any] = {**normalize_gen_kwargs(dict(given), LONGEST)}
        until = tuple(text for text in said.pop("until", None) or () if text)
        tokens, warm = said.pop("max_gen_toks"), said.pop("do_sample")
        temperature = float(said.pop("temperature", 1.0 if warm else 0.0)) if warm else 0.0
        said.pop("temperature", None)
        sampling = SamplingConfig(
            temperature, said.pop("top_k", None) or None, float(said.pop("top_p", 1.0)), int(tokens)
        )
        if unknown := [name for name, value in said.items() if NEUTRAL.get(name) != value]:
            raise UserError(f"tasks: {unknown[0]} of generation_kwargs is not known: write a task of your own without")
        return RequestHandler(sampling, until)


def cut(text: str, until: Sequence[str]) -> str:
    """What stands before the first stop string."""
    for stop in until:
        text = text.split(stop)[0]
    return text


@cache
def manager(include: str | None, own: bool = False) -> TaskManager:
    """All tasks by name; with `own`, only those of a person's folder. The harness' own are some thousand files."""
    return TaskManager(include_path=include, include_defaults=not own)


def fitting(tasks: Sequence[str], include: str | None) -> TaskManager:
    """One that knows the tasks: a person's own, if they are but that. Groups may hold tasks from everywhere."""
    if include is not None and not Path(include).is_dir():
        raise UserError(f"include: {include} is no folder: name one with YAML files of tasks")
    alone = include is not None and set(tasks) <= set(manager(include, own=True).all_subtasks)
    return manager(include, own=alone)


def check(tasks: Sequence[str], include: str | None) -> None:
    """UserError if one of these tasks is none."""
    known = fitting(tasks, include).task_index
    for task in tasks:
        if task not in known:
            mine = manager(include, own=True).all_tasks if include is not None else ()
            meant = closest_match(task, mine) or closest_match(task, known)
            told = f"did you mean '{meant}'?" if meant else "`lm-eval ls tasks` lists those of the harness"
            raise UserError(f"tasks: there is no task '{task}'; {told}")


def loaded(tasks: Sequence[str], shots: int | None, include: str | None) -> dict[str, Any]:
    """Tasks with their rows, and with as many examples in each prompt, as the harness' own command would have them.

    A task that is meant to have no examples gets none. What has been asked once is loaded anew for another model: its
    draws of examples go on where they ended.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    with explained(tasks), quiet(sys.stderr.isatty()):
        found: Any = fitting(tasks, include).load(list(tasks))
    for name, task in found["tasks"].items():
        if task.get_config("unsafe_code"):
            raise UserError(f"tasks: {name} runs code that a model has written, which is not done here")
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return found


def said(error: Exception) -> str:
    """What went wrong, in a line that is not too long."""
    return (" ".join(str(error).split()) or type(error).__name__)[:SHOWN]


@contextmanager
def explained(tasks: Iterable[str]) -> Iterator[None]:
    """What the harness and the files of its tasks raise, told in one line."""
    try:
        yield
    except MISTAKES as error:
        gone = isinstance(error, ConnectionError)  # of the Hub, as the sets of rows tell it
        mend = "; what was fetched once stays here, and `include` names tasks with rows of your own" if gone else ""
        raise UserError(f"tasks: {', '.join(tasks)} cannot be asked: {said(error)}{mend}") from error


def quiet(shows: bool) -> AbstractContextManager[Any]:
    """Bars are for terminals, and drawn once."""
    return nullcontext() if shows else redirect_stderr(StringIO())


def measured(
    asked: LMEvalAdapter, tasks: Sequence[str], opened: dict[str, Any], limit: int | None, chat: bool
) -> list[TaskResult]:
    """What the model makes of tasks that were just loaded. All ranks know it."""
    how: dict[str, Any] = {"apply_chat_template": chat, "fewshot_as_multiturn": chat, "bootstrap_iters": 0}
    with explained(tasks), quiet(asked.run.is_main and sys.stderr.isatty()):
        made: Any = evaluator.evaluate(asked, opened, limit=limit, **how)
    return [found(task, made) for task in made["results"]]


def found(task: str, made: Mapping[str, Any]) -> TaskResult:
    """The figures of a task, or of a group of them."""
    rows = sorted(made["samples"].get(task, ()), key=lambda row: row["doc_id"])
    answers = [row["resps"][0][0] for row in rows if row["filter"] == rows[0]["filter"]]
    higher = made["higher_is_better"].get(task, {})
    figures = []
    for key, value in made["results"][task].items():
        metric, comma, way = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        own = [(row["doc_hash"], row.get(metric)) for row in rows if row["filter"] == way]
        name = metric if way == "none" else f"{metric} ({way})"
        figures.append(figure(name, float(value), own, higher.get(metric)))
    return TaskResult(task, tuple(figures), tuple(text for text in answers if isinstance(text, str)))


def figure(name: str, value: float, own: Sequence[tuple[str, object]], higher: bool | None) -> Metric:
    """With the values of its rows, where it is their mean."""
    values = [float(one) for _, one in own if isinstance(one, int | float)]
    mean = Metric.mean(name, values, higher=higher, rows=[row for row, _ in own])
    whole = len(values) == len(own) and math.isclose(mean.value, value, rel_tol=1e-9, abs_tol=1e-12)
    return replace(mean, value=value) if whole else Metric(name, value, higher)

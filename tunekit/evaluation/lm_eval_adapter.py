"""Tasks of EleutherAI's lm-evaluation-harness, evaluated with our decoder. Requires the extra `harness`."""

import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
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

from tunekit.data.chat_template.template_features import detect_features
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.errors import UserError, closest_match, did_you_mean
from tunekit.evaluation.loglikelihood import LoglikelihoodRequest, score_rows
from tunekit.evaluation.results import Metric, TaskResult
from tunekit.generation.generate import generate_answers
from tunekit.generation.sampling import SamplingConfig
from tunekit.hub import errors
from tunekit.hub.foreign_hints import drop_hints
from tunekit.models.decoder import Decoder

# Values of generation_kwargs that have no effect and are accepted.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}
MAX_QUOTE = 60  # characters of each text of a request in an error message
MAX_REASON = 300  # characters of the reason in an error message
DEFAULT_MAX_NEW_TOKENS = 256  # as in the harness
# Exceptions raised by task files and by missing datasets.
TASK_ERRORS = (*errors.CLIENT_ERRORS, LookupError, TypeError, ImportError)


class LMEvalAdapter(TemplateLM):
    """A decoder that answers the requests of the harness. Each rank gets all requests, and ranks share the work."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, batch_size: int, dist: DistributedContext, name: str
    ) -> None:
        super().__init__()
        self.model, self.text_tokenizer, self.name = model, tokenizer, name
        self.batch_size, self.dist = batch_size, dist
        self.max_length, self._device = model.spec.context, dist.device

    @property
    def eot_token_id(self) -> int:
        if self.text_tokenizer.eos is None:
            raise UserError(f"{self.name}: these tasks require a tokenizer with an end-of-text token")
        return self.text_tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without context: BOS, or EOS if there is no BOS."""
        return self.eot_token_id if self.text_tokenizer.bos is None else self.text_tokenizer.bos

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Token ids. By default, a BOS token is added unless the text starts with one, as chat templates write it."""
        has_prefix = string.startswith(self.text_tokenizer.decode([self.prefix_token_id], special=True))
        special = not has_prefix if add_special_tokens is None else add_special_tokens
        return self.text_tokenizer.encode(string, special=special)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.text_tokenizer.template_texts["default"] if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the chat template; without a generation prompt, it ends with the last message text."""
        tokenizer = self.text_tokenizer
        messages = detect_features(tokenizer.template(), tokenizer).adapt_messages(chat_history)
        text = tokenizer.render(messages, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations. Raises UserError if a context or a continuation has no tokens."""
        encoded = [(request.args, *self.encode_pair(*request.args)) for request in requests]
        for request, (_, context, continuation) in zip(requests, encoded, strict=True):
            self.check_request(request, len(context), len(continuation))
        return self._loglikelihood_tokens(encoded)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of context and continuation. An empty context becomes the prefix token."""
        if context:
            return self._encode_pair(context, continuation)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        has_prefix = tokens[:1] == [self.prefix_token_id]
        return [self.prefix_token_id], tokens[1:] if has_prefix else tokens

    def check_request(self, request: Instance, num_context: int, num_continuation: int) -> None:
        """Raise UserError, with the task and its row, if a request of these lengths has no likelihood."""
        if num_context and 0 < num_continuation <= self.max_length:
            return
        if not num_context:
            problem = "the context has no tokens"
        elif not num_continuation:
            problem = "the continuation has no tokens"
        else:
            problem = f"the continuation has {num_continuation} tokens, and the context length is {self.max_length}"
        texts = ", ".join(repr(text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}...") for text in request.args)
        raise row_error(request, f"({texts}): {problem}. Fix the row, or doc_to_text and doc_to_choice of the task.")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether greedy decoding produces each of them."""
        rows = []
        for _texts, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            rows.append(LoglikelihoodRequest(tokens, range(max(1, len(tokens) - len(continuation)), len(tokens))))
        return list(score_rows(self.model, rows, self.batch_size, self.dist))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihoods of full texts. Long texts are split into windows that score each token once."""
        windows: list[Any] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            token_windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for window in map(make_disjoint_window, token_windows):
                windows.append((None, *window))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += logprob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Completions up to a stop string. Requests with equal settings share forward passes, the longest first."""
        pairs = [cast("tuple[str, dict[str, Any]]", request.args) for request in requests]
        prompts = [self.tok_encode(text) for text, _ in pairs]
        samplings = [to_sampling(generation_kwargs) for _, generation_kwargs in pairs]
        for request, prompt in zip(requests, prompts, strict=True):
            if not prompt:
                raise row_error(request, "the prompt has no tokens. Fix the row, or doc_to_text of the task.")
        order = sorted(range(len(requests)), key=lambda i: (repr(samplings[i]), -len(prompts[i])))
        completions: dict[int, str] = {}
        for sampling, group in groupby(order, key=lambda i: samplings[i]):
            indices = list(group)
            outputs = self.generate(sampling, [prompts[i] for i in indices])
            completions.update(zip(indices, outputs, strict=True))
        return [completions[i] for i in range(len(requests))]

    def generate(self, sampling: SamplingConfig, prompts: list[list[int]]) -> list[str]:
        """Completions of prompts, which are truncated on the left to leave space for the new tokens."""
        max_prompt = self.max_length - sampling.max_new_tokens
        if max_prompt < 1:
            problem = f"max_gen_toks is {sampling.max_new_tokens}, and the context length is {self.max_length}"
            raise UserError(f"tasks: {problem}. Define your own task with a smaller max_gen_toks.")
        prompts = [prompt[-max_prompt:] for prompt in prompts]
        answers = generate_answers(self.model, self.text_tokenizer, prompts, sampling, self.batch_size, self.dist)
        return [text for text, _ in answers]


def row_error(request: Instance, problem: str) -> UserError:
    return UserError(f"tasks: row {request.doc_id} of {request.task_name or 'a task'}: {problem}")


def to_sampling(generation_kwargs: Mapping[str, Any]) -> SamplingConfig:
    """Sampling options from the `generation_kwargs` of a task. Raises UserError for unsupported ones."""
    options: dict[str, Any] = {**normalize_gen_kwargs(dict(generation_kwargs), DEFAULT_MAX_NEW_TOKENS)}
    until = tuple(text for text in options.pop("until", None) or () if text)
    max_new_tokens, do_sample = options.pop("max_gen_toks"), options.pop("do_sample")
    temperature = float(options.pop("temperature", 1.0 if do_sample else 0.0)) if do_sample else 0.0
    options.pop("temperature", None)
    sampling = SamplingConfig(
        temperature,
        options.pop("top_k", None) or None,
        float(options.pop("top_p", 1.0)),
        float(options.pop("min_p", None) or 0.0),
        float(options.pop("repetition_penalty", 1.0)),
        stop_strings=until,
        max_new_tokens=int(max_new_tokens),
    )
    if unknown := [name for name, value in options.items() if NEUTRAL.get(name) != value]:
        raise UserError(f"tasks: {unknown[0]} in generation_kwargs is not supported. Define your own task without it.")
    return sampling


@cache
def task_manager(include: str | None, include_defaults: bool = True) -> TaskManager:
    """Index of tasks by name. The defaults of the harness are some thousand files."""
    return TaskManager(include_path=include, include_defaults=include_defaults)


def find_task_manager(tasks: Sequence[str], include: str | None) -> TaskManager:
    """The smallest index that has the tasks. User groups may contain tasks of the harness."""
    if include is not None and not Path(include).is_dir():
        raise UserError(f"include_path: {include} is not a directory. Set it to a directory with YAML files of tasks.")
    all_included = include is not None and set(tasks) <= set(task_manager(include, False).all_subtasks)
    return task_manager(include, not all_included)


def check_tasks(tasks: Sequence[str], include: str | None) -> None:
    """Raise UserError if a task does not exist."""
    index = find_task_manager(tasks, include).task_index
    for task in tasks:
        if task not in index:
            user_tasks = task_manager(include, False).all_tasks if include is not None else ()
            known = user_tasks if closest_match(task, user_tasks) else index
            hint = did_you_mean(task, known, "List the tasks of the harness with: lm-eval ls tasks")
            raise UserError(f"tasks: unknown task '{task}'.{hint}")


def load_tasks(tasks: Sequence[str], shots: int | None, include: str | None) -> dict[str, Any]:
    """Tasks with their rows and few-shot settings, as in the command line of the harness.

    Tasks that define 0 shots keep them. Load tasks again for each model, because drawing few-shot examples advances
    the random state of a task.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    errors.configure_client()
    with wrap_task_errors(tasks), hide_progress_bars(sys.stderr.isatty()):
        loaded: Any = find_task_manager(tasks, include).load(list(tasks))
    for name, task in loaded["tasks"].items():
        if task.get_config("unsafe_code"):
            raise UserError(f"tasks: {name} runs code generated by the model, which is not supported")
        num_fewshot = task.get_config("num_fewshot")
        if num_fewshot is None or (shots is not None and num_fewshot != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


@contextmanager
def wrap_task_errors(tasks: Iterable[str]) -> Iterator[None]:
    """Turn exceptions of the harness and of its task files into a UserError."""
    try:
        yield
    except TASK_ERRORS as error:
        is_offline = isinstance(error, ConnectionError)  # raised by datasets if the Hub cannot be reached
        hint = ". Downloaded datasets are cached; `include_path` adds tasks with local rows." if is_offline else ""
        reason = drop_hints(error)[:MAX_REASON]
        raise UserError(f"tasks: cannot evaluate {', '.join(tasks)}: {reason}{hint}") from error


def hide_progress_bars(is_terminal: bool) -> AbstractContextManager[Any]:
    """Discard stderr unless it is a terminal."""
    return nullcontext() if is_terminal else redirect_stderr(StringIO())


def evaluate_tasks(
    adapter: LMEvalAdapter, tasks: Sequence[str], loaded_tasks: dict[str, Any], limit: int | None, chat: bool
) -> list[TaskResult]:
    """Results on freshly loaded tasks, the same on all ranks."""
    options: dict[str, Any] = {"apply_chat_template": chat, "fewshot_as_multiturn": chat, "bootstrap_iters": 0}
    with wrap_task_errors(tasks), hide_progress_bars(adapter.dist.is_main_process and sys.stderr.isatty()):
        output: Any = evaluator.evaluate(adapter, loaded_tasks, limit=limit, **options)
    return [parse_result(task, output) for task in output["results"]]


def parse_result(task: str, output: Mapping[str, Any]) -> TaskResult:
    """Metrics and answers of a task or a group from the output of the harness."""
    rows = sorted(output["samples"].get(task, ()), key=lambda row: row["doc_id"])
    answers = [row["resps"][0][0] for row in rows if row["filter"] == rows[0]["filter"]]
    higher_is_better = output["higher_is_better"].get(task, {})
    metrics = []
    for key, value in output["results"][task].items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        values = [(row["doc_hash"], row.get(metric)) for row in rows if row["filter"] == filter_name]
        name = metric if filter_name == "none" else f"{metric} ({filter_name})"
        metrics.append(make_metric(name, float(value), values, higher_is_better.get(metric)))
    return TaskResult(task, tuple(metrics), tuple(text for text in answers if isinstance(text, str)))


def make_metric(
    name: str, value: float, row_values: Sequence[tuple[str, object]], higher_is_better: bool | None
) -> Metric:
    """A metric, with the values of its rows if it is their mean."""
    values = [float(number) for _, number in row_values if isinstance(number, int | float)]
    mean = Metric.mean(name, values, higher_is_better=higher_is_better, rows=[row for row, _ in row_values])
    is_mean = len(values) == len(row_values) and math.isclose(mean.value, value, rel_tol=1e-9, abs_tol=1e-12)
    return replace(mean, value=value) if is_mean else Metric(name, value, higher_is_better)

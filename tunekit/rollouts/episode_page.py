"""Web page of episodes, to read them turn by turn: one self-contained file, without scripts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tunekit.data.inspect.html_report import escape, html_page
from tunekit.generation.token_probabilities import colored

STYLE = """
summary { cursor: pointer; }
.turn { border-left: .3rem solid var(--line); padding-left: .8rem; }
.observation { color: var(--faint); }
.text i { color: #1d2327; }
"""


def render_episodes(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """Page of the lines of an `episodes.jsonl`."""
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
    largest = max((abs(value) for record in records for value in record["advantages"] or ()), default=0.0)
    has_advantages = any(record["advantages"] is not None for record in records)
    measure = "advantage, from red (negative) to green (positive)" if has_advantages else "probability, red is low"
    episodes = "\n".join(render_episode(record, number, largest) for number, record in enumerate(records, 1))
    summary = (
        f"{len(records)} episodes{mean}. Sampled tokens are colored by {measure}. Gray text comes from the environment "
        "and is not trained. Point at a token for its numbers."
    )
    return html_page(title, f'<p class="faint">{summary}</p>\n{episodes}', STYLE)


def render_episode(record: Mapping[str, Any], number: int, largest: float) -> str:
    """One episode, folded. `largest` is the advantage with the strongest color."""
    rewards = ", ".join(f"{name} {format_number(value)}" for name, value in record["rewards"].items())
    metrics = ", ".join(f"{name} {format_number(value)}" for name, value in record["metrics"].items())
    num_sampled = sum(record["sampled"])
    head = f"{number}. {record['row']}: reward {format_number(record['reward'])}"
    facts = "; ".join(
        filter(None, (rewards, metrics, f"{num_sampled} sampled tokens", f"ended by {record['finish_reason']}"))
    )
    turns = "\n".join(render_turns(record, largest))
    return (
        f'<details class="card"{" open" if number == 1 else ""}><summary><b>{escape(head)}</b> '
        f'<span class="faint">{escape(facts)}</span></summary>\n'
        f'<div class="text observation">{escape(record["prompt_text"])}</div>\n{turns}\n</details>'
    )


def render_turns(record: Mapping[str, Any], largest: float) -> Iterator[str]:
    """Answers and observations, in their order."""
    advantages = record["advantages"] or [None] * len(record["tokens"])
    columns = zip(record["sampled"], record["token_ids"], record["tokens"], record["logprobs"], advantages, strict=True)
    for is_sampled, tokens in groupby(columns, lambda column: column[0]):
        if is_sampled:
            shown = "".join(render_token(*token[1:], largest) for token in tokens)
            yield f'<div class="text turn">{shown}</div>'
        else:
            yield f'<div class="text observation">{escape("".join(token[2] for token in tokens))}</div>'


def render_token(token: int, text: str, logprob: float, advantage: float | None, largest: float) -> str:
    """A sampled token. Its tooltip has the numbers."""
    probability = math.exp(min(logprob, 0.0))
    tip = f"token {token}\nprobability {probability:.2%} (log {logprob:.4f})"
    level = probability
    if advantage is not None:
        tip += f"\nadvantage {advantage:.4f}"
        level = 0.5 + 0.5 * advantage / largest if largest else 0.5
    return colored(text, level, tip)


def format_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"

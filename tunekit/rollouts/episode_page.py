"""Web page of episodes, to read them turn by turn: one self-contained file, without scripts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tunekit.templates.render import render_template

EPISODE_KEYS = {
    "prompt_text",
    "tokens",
    "token_ids",
    "sampled",
    "logprobs",
    "advantages",
    "rewards",
    "reward",
    "row",
    "metrics",
}  # that a page needs
ColoredToken = tuple[str, float, str]  # text, level of the color, tooltip


def render_episodes(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """Page of the lines of an `episodes.jsonl`."""
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
    largest = max((abs(value) for record in records for value in record["advantages"] or ()), default=0.0)
    has_advantages = any(record["advantages"] is not None for record in records)
    measure = "advantage, from red (negative) to green (positive)" if has_advantages else "probability, red is low"
    summary = f"{len(records)} episodes{mean}. Sampled tokens are colored by {measure}."
    episodes = [describe_episode(record, number, largest) for number, record in enumerate(records, 1)]
    return render_template("episodes.html.j2", title=title, summary=summary, episodes=episodes)


def describe_episode(record: Mapping[str, Any], number: int, largest: float) -> dict[str, Any]:
    """Texts of one episode. `largest` is the advantage with the strongest color."""
    rewards = ", ".join(f"{name} {format_number(value)}" for name, value in record["rewards"].items())
    metrics = ", ".join(f"{name} {format_number(value)}" for name, value in record["metrics"].items())
    facts = (rewards, metrics, f"{sum(record['sampled'])} sampled tokens", f"ended by {record['finish_reason']}")
    return {
        "title": f"{number}. {record['row']}: reward {format_number(record['reward'])}",
        "facts": "; ".join(filter(None, facts)),
        "prompt": record["prompt_text"],
        "turns": list(split_turns(record, largest)),
    }


def split_turns(record: Mapping[str, Any], largest: float) -> Iterator[str | list[ColoredToken]]:
    """Answers, as tokens, and observations, as text, in their order."""
    advantages = record["advantages"] or [None] * len(record["tokens"])
    columns = zip(record["sampled"], record["token_ids"], record["tokens"], record["logprobs"], advantages, strict=True)
    for is_sampled, tokens in groupby(columns, lambda column: column[0]):
        if is_sampled:
            yield [color_token(*token[1:], largest) for token in tokens]
        else:
            yield "".join(token[2] for token in tokens)


def color_token(token: int, text: str, logprob: float, advantage: float | None, largest: float) -> ColoredToken:
    """A sampled token. Its tooltip has the numbers."""
    probability = math.exp(min(logprob, 0.0))
    tip = f"token {token}\nprobability {probability:.2%} (log {logprob:.4f})"
    level = probability
    if advantage is not None:
        tip += f"\nadvantage {advantage:.4f}"
        level = 0.5 + 0.5 * advantage / largest if largest else 0.5
    return text, level, tip


def format_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"

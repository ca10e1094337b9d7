"""Episodes as JSON lines and as a page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.rollouts import make_rollout
from tunekit.build import resolve_model
from tunekit.cli import main as cli
from tunekit.data.tokenizer import Tokenizer
from tunekit.hub import download
from tunekit.rollouts.episode_log import episode_record
from tunekit.rollouts.episode_page import render_episodes
from tunekit.rollouts.rollout import Rollout


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return resolve_model("tunekit/nano", download.SMALL, {})[2]


def make_episode(tokenizer: Tokenizer, answer: str = "Höhe 日本 <b>&", observation: str = "<i>wall</i>") -> Rollout:
    """An answer, an observation, and another answer."""
    parts = [tokenizer.encode(text) for text in (answer, observation, "end")]
    rollout = make_rollout(answer)
    mask = [False, False, *(index != 1 for index, part in enumerate(parts) for _ in part)]
    tokens = np.array([1, 2, *sum(parts, [])], np.int32)
    logprobs = np.where(mask, np.float32(-0.25), np.float32(0))
    return replace(rollout, tokens=tokens, loss_mask=np.array(mask), logprobs=logprobs, metrics={"num_turns": 2})


def test_record_has_an_item_for_each_token(tokenizer: Tokenizer) -> None:
    rollout = make_episode(tokenizer)
    advantages = np.arange(len(rollout.completion_ids)) / 3
    record = json.loads(json.dumps(episode_record(tokenizer, rollout, {"r": None}, 1.5, advantages.tolist())))
    lists = [record[name] for name in ("token_ids", "tokens", "sampled", "logprobs", "advantages")]
    assert {len(values) for values in lists} == {len(rollout.completion_ids)}
    assert "".join(record["tokens"]) == tokenizer.decode(rollout.completion_ids)
    assert record["sampled"] == rollout.loss_mask[2:].tolist() and record["rewards"] == {"r": None}
    np.testing.assert_allclose(record["logprobs"], rollout.logprobs[2:])


class Texts(HTMLParser):
    """Texts of a page by the class of their block, and tooltips."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.block, self.texts, self.tips, self.tags = "", [], [], set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "div":
            self.texts.append((dict(attrs)["class"], ""))
        if tag == "i":
            self.tips.append(dict(attrs)["title"])

    def handle_data(self, data: str) -> None:
        if self.texts:
            kind, text = self.texts[-1]
            self.texts[-1] = kind, text + data


def test_page_shows_answers_and_observations(tokenizer: Tokenizer) -> None:
    rollout = make_episode(tokenizer)
    advantages = np.linspace(-1, 1, len(rollout.completion_ids)).tolist()
    page = render_episodes([episode_record(tokenizer, rollout, {"r": 1.0}, 1.0, advantages)], "a & b")
    parsed = Texts(page)
    kinds = [(kind.removeprefix("text "), text.strip()) for kind, text in parsed.texts]
    assert kinds[1:] == [("turn", "Höhe 日本 <b>&"), ("observation", "<i>wall</i>"), ("turn", "end")]
    assert "script" not in parsed.tags and "b" in parsed.tags
    assert len(parsed.tips) == rollout.num_sampled_tokens
    assert "advantage -1.0000" in str(parsed.tips[0]) and "probability 77.88%" in str(parsed.tips[0])
    assert re.search(r"hsl\(0 .*hsl\(120 ", page, re.DOTALL)


def test_command(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    records = [episode_record(tokenizer, make_episode(tokenizer, f"answer {i}"), {}, None) for i in range(3)]
    Path("episodes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cli.main(["episodes", ".", "--num-rows", "2"]) == 0
    page = Path("episodes.html").read_text()
    assert (
        "2 episodes" in page
        and "answer 1" in re.sub("<[^>]*>", "", page)
        and "answer 0" not in re.sub("<[^>]*>", "", page)
    )
    for text, args in (("{}", ["."]), ("[", ["."]), ("", ["missing.jsonl"]), ("", [".", "--html", "page.txt"])):
        Path("episodes.jsonl").write_text(text)
        capsys.readouterr()
        assert cli.main(["episodes", *args]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1

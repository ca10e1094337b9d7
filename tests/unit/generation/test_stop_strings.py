"""Texts that end an answer: the first one does, and nothing after it is generated or printed."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunekit import assets, build
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.generation.generate import generate_answers, stream_text
from tunekit.generation.sampling import SamplingConfig
from tunekit.generation.stop_strings import StopStrings
from tunekit.models.decoder import Decoder
from tunekit.models.precision import PrecisionConfig

MESSAGES = [{"role": "user", "content": "What is the story of the cat and the ball?"}]
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def nano() -> tuple[Decoder, Tokenizer]:
    return build.load_for_inference("tunekit/nano", PrecisionConfig("fp32"), DistributedContext(0, "cpu"))


def answer(nano: tuple[Decoder, Tokenizer], *stop_strings: str) -> str:
    sampling = SamplingConfig(stop_strings=stop_strings, max_new_tokens=NUM_TOKENS)
    prompts = [nano[1].encode_prompt(MESSAGES)]
    ((text, _),) = generate_answers(*nano, prompts, sampling, 1, DistributedContext(0, "cpu"))
    assert "".join(stream_text(*nano, MESSAGES, sampling)) == text
    return text


def test_answers_end_where_those_of_transformers_end(nano: tuple[Decoder, Tokenizer]) -> None:
    full = answer(nano)
    path = assets.model_dir("tunekit/nano")
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).float()
    prompt = torch.tensor([nano[1].encode_prompt(MESSAGES)])
    for stop in (full[8:11], full[20:23], full[5], full[-4:]):  # within, at and across the ends of tokens
        ids = model.generate(
            prompt, stop_strings=[stop], tokenizer=tokenizer, max_new_tokens=NUM_TOKENS, do_sample=False
        )
        expected = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        assert stop in expected
        assert answer(nano, stop) == expected[: expected.index(stop)] == full[: full.index(stop)]


def test_first_of_several_texts_ends_an_answer(nano: tuple[Decoder, Tokenizer]) -> None:
    full = answer(nano)
    assert (
        answer(nano, "not in it", full[12:15], full[6:9]) == full[: min(full.index(full[12:15]), full.index(full[6:9]))]
    )
    assert answer(nano, "not in it") == full


def test_special_token_is_a_stop_token(nano: tuple[Decoder, Tokenizer]) -> None:
    """Decoded answers do not contain it, so that its text would never be found."""
    token, text = next((token, text) for token, text in nano[1].special_ids.items() if token not in nano[1].stops)
    assert StopStrings(nano[1], (text,)).token_ids == nano[1].stops | {token}


def test_start_of_a_stop_string_is_held_back(nano: tuple[Decoder, Tokenizer]) -> None:
    stop = StopStrings(nano[1], ("</end>", "ab"))
    assert [stop.printable(text) for text in ("x</en", "x<", "xa", "x", "aa", "</end")] == ["x", "x", "x", "x", "a", ""]

"""Probabilities of the tokens of a text, and a web page that shows them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tunekit.data.inspect.token_display import decode_groups, show_whitespace
from tunekit.data.token_bytes import TokenBytes
from tunekit.data.tokenizer import Tokenizer
from tunekit.models.decoder import Decoder
from tunekit.templates.render import render_template

NUM_ALTERNATIVES = 5


class TokenProbability(NamedTuple):
    """Probability of a token after the tokens before it, and the most likely tokens with theirs."""

    token: int
    probability: float
    alternatives: list[tuple[int, float]]


def token_probabilities(model: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> list[TokenProbability]:
    """Probability of each token of an answer, in one forward pass."""
    if not answer:
        return []
    targets = torch.tensor(answer, device=model.device)

    def read(hidden: Tensor, head: nn.Module) -> Tensor:
        """(n, 2k + 1): the log-probability of the target, those of the k most likely tokens, and their ids."""
        chunks = []
        for rows, tokens in zip(hidden[0, len(prompt) - 1 :].split(256), targets.split(256), strict=True):
            logprobs = head(rows).float().log_softmax(-1)
            values, ids = logprobs.topk(min(NUM_ALTERNATIVES, logprobs.shape[-1]))
            chunks.append(torch.cat([logprobs.gather(1, tokens[:, None]), values, ids.float()], 1))
        return torch.cat(chunks)

    model.eval()
    with torch.inference_mode():
        table = model(torch.tensor([[*prompt, *answer[:-1]]], device=model.device), head_fn=read).cpu().double()
    probabilities, ids = table.split([(table.shape[1] + 1) // 2, table.shape[1] // 2], dim=1)
    rows = zip(answer, probabilities.exp().tolist(), ids.long().tolist(), strict=True)
    return [TokenProbability(token, first, list(zip(ids, rest, strict=True))) for token, (first, *rest), ids in rows]


def render_probabilities(
    tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[TokenProbability], title: str
) -> str:
    """A web page of a prompt and an answer. The color of a token is from red (0) over yellow to green (1)."""
    tokens, index = [], 0
    for ids, text, special in decode_groups(tokenizer, [item.token for item in answer]):
        items, index = answer[index : index + len(ids)], index + len(ids)
        tooltip = "\n".join(describe_token(tokenizer, item) for item in items)
        shown = text if special else show_whitespace(text, False, False)
        tokens.append((shown, min(item.probability for item in items), tooltip))
    context = tokenizer.decode(prompt, special=True)
    return render_template("probabilities.html.j2", title=title, prompt=context, tokens=tokens)


def describe_token(tokenizer: Tokenizer, item: TokenProbability) -> str:
    """Probability of a token, then the most likely tokens, one per line."""
    pairs = [(item.token, item.probability), *item.alternatives]
    names = TokenBytes(tokenizer)
    lines = [f"{probability:.2%} {names.label(token)!r} ({token})" for token, probability in pairs]
    return "\n".join([lines[0], "most likely:", *lines[1:]])

"""Target spans of rendered conversations, as in training."""

from collections.abc import Sequence
from typing import Any

from tunekit.data.chat_template.loss_mask import MaskedConversation, render_with_mask, token_range
from tunekit.data.chat_template.messages import Conversation
from tunekit.data.tokenize import target_turns
from tunekit.data.tokenizer import Tokenizer

TrainOn = str | Sequence[int]  # a value of `train_on`, or message indices


def render_targets(
    tokenizer: Tokenizer, messages: list[dict], tools: Any = None, train_on: TrainOn = "assistant"
) -> MaskedConversation:
    """Rendered text of a conversation and the spans of its target messages."""
    turns: Any = target_turns(Conversation(messages), train_on) if isinstance(train_on, str) else train_on
    return render_with_mask(tokenizer, messages, tools, None if train_on == "all" else tuple(turns))


def target_texts(
    tokenizer: Tokenizer, messages: list[dict], tools: Any = None, train_on: TrainOn = "assistant"
) -> list[str]:
    """Text of each run of target tokens."""
    text, spans, _ = render_targets(tokenizer, messages, tools, train_on)
    encoding = tokenizer.encode_rendered([text])[0]
    ranges = [token_range(encoding, text, span, tokenizer.special_ids) for span in spans]
    return [tokenizer.decode(encoding.ids[start:end], special=True) for start, end in ranges]

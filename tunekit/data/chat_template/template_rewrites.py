"""Ways in which a chat template rewrites earlier turns, found by rendering probes.

Rendering a conversation again then gives other tokens than those that were sampled: `tool_result_tokens` appends to the
sampled tokens instead.
"""

from typing import Literal

from tunekit.data.chat_template.messages import Message, Tools
from tunekit.data.chat_template.template_features import ANSWER, CALL_ID, QUESTION, TOOL_NAME, try_render
from tunekit.data.tokenizer import Tokenizer

Rewrite = Literal["prompt", "reasoning", "calls", "tools", "end", "whitespace"]
THOUGHT = "yhnujm"


def find_rewrites(tokenizer: Tokenizer, tools: Tools = None) -> list[Rewrite]:
    """Parts of earlier turns that the template rewrites; empty if it keeps all of them.

    `prompt`: the start of an answer is not part of its turn. `reasoning`: an answer's reasoning changes when a user
    message follows. `calls`: an answer with calls changes when their results follow. `tools`: the tool schemas move to
    the last user message. `end`: the last turn ends differently. `whitespace`: content is stripped.
    """
    probe = RewriteProbe(tokenizer)
    plain: Message = {"role": "assistant", "content": ANSWER}
    padded: Message = {"role": "assistant", "content": f" {ANSWER}\n "}
    thoughtful = {**plain, "reasoning_content": THOUGHT}
    question: Message = {"role": "user", "content": f"{QUESTION} {QUESTION}"}
    function = {"name": TOOL_NAME, "arguments": {ANSWER: ANSWER}}
    call: Message = {"type": "function", "id": CALL_ID.format(0), "function": function}
    result: Message = {"role": "tool", "tool_call_id": CALL_ID.format(0), "name": TOOL_NAME, "content": "7"}
    calling: Message = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [call]}
    rewritten: dict[Rewrite, bool] = {
        "prompt": not probe.render([plain], tools).startswith(probe.render([], tools, True)),
        "reasoning": not (probe.is_preserved(plain, question, None) and probe.is_preserved(thoughtful, question, None)),
        "calls": not probe.is_preserved(calling, result, tools),
        "tools": probe.is_preserved(plain, question, None) and not probe.is_preserved(plain, question, tools),
        "end": not probe.is_preserved(plain, question, None, with_end=True),
        "whitespace": padded["content"] not in probe.render([padded], None),
    }
    return [name for name, is_rewritten in rewritten.items() if is_rewritten]


class RewriteProbe:
    """Renders a question and an answer, without and with a message that follows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def render(self, messages: list[Message], tools: Tools, prompt: bool = False) -> str:
        return try_render(self.tokenizer, [{"role": "user", "content": QUESTION}, *messages], tools, prompt)

    def is_preserved(self, answer: Message, following: Message, tools: Tools, with_end: bool = False) -> bool:
        """Whether an answer, up to its end or with its end-of-turn token, is the same when a message follows it."""
        before, after = self.render([answer], tools), self.render([answer, following], tools, True)
        end = before.rfind(ANSWER) + len(ANSWER)
        if end < len(ANSWER) or not after:  # the template does not write such answers
            return True
        if not with_end:
            return after.startswith(before[:end])
        token = self.tokenizer.special_texts.match(before[end:].lstrip())
        return token is None or after[after.find(ANSWER) + len(ANSWER) :].lstrip().startswith(token[0])

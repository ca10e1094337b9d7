"""Kind, message and hint of the findings about documents with a flag."""

from tunekit.data.document import DocFlags

FLAG_FINDINGS = {
    DocFlags.SPECIAL_IN_TEXT: (
        "special tokens",
        "messages of {rows} contain the text of a special token, which becomes that token",
        "Remove it from the text",
    ),
    DocFlags.PROMPT_TRAINED: (
        "prompt in targets",
        "the prompt of the answer is part of the target tokens in {rows}",
        "Start the {% generation %} block of the chat template after it",
    ),
    DocFlags.TOOLS_NOT_RENDERED: (
        "tools unused",
        "{rows} {have} tools or calls that the chat template does not render",
        "Set a `chat_template` that does, or remove them",
    ),
    DocFlags.REASONING_DROPPED: (
        "reasoning dropped",
        "the chat template drops reasoning of {rows}",
        "To train on it, set a `chat_template` that renders it",
    ),
    DocFlags.CONTENT_LOST: (
        "content lost",
        "the chat template does not render all message content of {rows}",
        "Set a `chat_template` that does",
    ),
    DocFlags.FIRST_TOKEN_MERGED: (
        "merged tokens",
        "the first token of the answer also covers the end of the prompt in {rows}, and is not a target",
        "Start answers with a space, or end prompts with a line break",
    ),
    DocFlags.NEGATIVES_UNUSED: (
        "negatives unused",
        "{rows} {have} more hard negatives than are used (by default as many as the first row has)",
        "Set `num_negatives` to a number that all rows have; 0 ignores them",
    ),
}

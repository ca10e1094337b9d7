"""Flags of documents: oddities that the data checks count and report, and properties that losses depend on."""

from enum import IntFlag

UNEQUAL_WEIGHTS = "message weights between 0 and 1 need recipe sft with a built-in loss. Set weight to 0 or 1."


class DocFlags(IntFlag):
    """Bits of a document. The last six are properties, not oddities.

    `loss_mask` sets MISSING_END_TOKEN and PROMPT_TRAINED, `template_warnings` the other oddities of conversations.
    """

    SPECIAL_IN_TEXT = 1  # a user, system, or tool message contains the text of a special token
    MISSING_END_TOKEN = 2  # the end token of a target turn is not a target: the model is not trained to stop
    PROMPT_TRAINED = 4  # a generation block covers text of the prompt
    TOOLS_NOT_RENDERED = 8  # the row has tools or tool calls that the template does not render
    REASONING_DROPPED = 16  # a target turn has reasoning that the template does not render
    CONTENT_LOST = 32  # message content that is missing in the rendered text
    EMPTY_TURN = 64  # a target turn is empty: the model is trained to stop at once
    FIRST_TOKEN_MERGED = 256  # the first token of a text's answer covers the end of its prompt, and is not a target
    NEGATIVES_UNUSED = 512  # the row has more hard negatives than are used
    DESIRABLE = 1 << 16  # chosen, or labeled as good
    UNDESIRABLE = 1 << 17  # rejected, or labeled as bad
    STEPWISE = 1 << 18  # has a label for each step, at the last token of the step
    SPLIT = 1 << 19  # one of several windows of a row
    WEIGHTED = 1 << 20  # has a loss weight for each target token
    SEGMENTS = 1 << 21  # segments: without a chat template, and a target need not be a complete turn

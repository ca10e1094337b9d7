"""What a document shows that is seldom meant: not wrong for sure, so it is counted and told rather than refused."""

from enum import IntFlag


class DocFlags(IntFlag):
    """Bits that a row's documents carry. Spans find UNENDED and PROMPT_LEARNT, messages the others.

    The last are no oddity: what a row says of its answer, that it is a good or a bad one, or that its steps are judged,
    each at its last token; and that a document is a part of a row that was split.
    """

    SPECIAL_IN_TEXT = 1  # what a user, the system or a tool says holds the text of a special token
    MISSING_END_TOKEN = 2  # a learnt turn whose end token is not learnt: the model is not taught to stop
    PROMPT_TRAINED = 4  # a generation block covers what the prompt writes
    TOOLS_NOT_RENDERED = 8  # the row has tools or calls, the template writes nothing of them
    REASONING_DROPPED = 16  # a learnt turn has reasoning, the template does not write it
    CONTENT_LOST = 32  # what a message says does not come in the text that the template writes
    EMPTY_TURN = 64  # a learnt turn says nothing: the model is taught to end at once
    DESIRABLE = 1 << 16
    UNDESIRABLE = 1 << 17
    STEPWISE = 1 << 18
    SPLIT = 1 << 19

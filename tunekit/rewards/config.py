"""All kinds of rewards of a config."""

from tunekit.rewards.answer_rewards import (
    ExactMatch,
    GSM8KCorrectness,
    GSM8KFormat,
    JsonSchemaMatch,
    Length,
    NumericMatch,
    RegexMatch,
    SoftOverlongPunishment,
)
from tunekit.rewards.llm_judge import LLMJudge
from tunekit.rewards.math_accuracy import Accuracy
from tunekit.rewards.reward_model import RewardModel
from tunekit.rewards.unit_tests import UnitTests
from tunekit.rewards.user_function import UserFunction

RewardChoice = (
    ExactMatch
    | NumericMatch
    | Accuracy
    | RegexMatch
    | JsonSchemaMatch
    | UnitTests
    | Length
    | SoftOverlongPunishment
    | RewardModel
    | LLMJudge
    | GSM8KCorrectness
    | GSM8KFormat
    | UserFunction
)

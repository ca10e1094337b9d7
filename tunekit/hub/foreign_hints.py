"""Messages of other libraries without their hints: arguments of Python functions, which commands do not have."""

import re

# Arguments of Python functions (`force_download=True`, `token=<your_token>`), and calls in backticks.
API = re.compile(
    r"(?<![\w?&/.-])[a-z_]{2,}=(?:True|False|None|<)|`[\w.]+\("
    r"|\b(?:trust_remote_code|use_auth_token|force_download|local_files_only|verification_mode|download_mode"
    r"|ignore_verifications|weights_only|huggingface-cli)\b"
)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z'`(])|\n+")


def drop_hints(error: BaseException) -> str:
    """Return the message of an error in one line, without the sentences that name a Python API; its type if all do."""
    sentences = (" ".join(sentence.split()) for sentence in SENTENCE.split(str(error)))
    reasons = [sentence for sentence in sentences if sentence and not API.search(sentence)]
    if reasons and reasons[-1].endswith(":"):  # it introduced a hint
        reasons.pop()
    return " ".join(reasons) or type(error).__name__

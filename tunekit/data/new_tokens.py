"""Tokens that a run adds to the tokenizer of its checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from tunekit.data.tokenizer import Tokenizer
from tunekit.data.tokenizer_files import read_json, write_json
from tunekit.errors import UserError

TokenTexts = tuple[str, ...] | dict[str, str]  # tokens, each with a text whose embeddings it starts from


@dataclass(frozen=True)
class NewToken:
    """A token that is not in the files of the checkpoint."""

    id: int
    text: str
    is_special: bool
    init_ids: tuple[int, ...]  # its embedding starts as the mean of those of these tokens; empty: of all tokens

    @property
    def json(self) -> dict[str, object]:
        """Entry of `added_tokens_decoder` in tokenizer_config.json."""
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        return {"content": self.text, **flags, "normalized": not self.is_special, "special": self.is_special}


def add_new_tokens(
    tokenizer: Tokenizer, tokens: TokenTexts, special_tokens: TokenTexts
) -> tuple[Tokenizer, tuple[NewToken, ...]]:
    """Copy of a tokenizer with new tokens, with the ids of `add_tokens` of transformers, and these tokens.

    Raises UserError for an empty text, a token that the tokenizer has, or a description without tokens.
    """
    added: list[NewToken] = []
    extended = tokenizer
    for key, texts, is_special in (("new_tokens", tokens, False), ("new_special_tokens", special_tokens, True)):
        for text in texts:
            known = extended.model.token_to_id(text)
            if known is not None or not text:
                reason = "is listed twice" if known in {token.id for token in added} else f"is already token {known}"
                raise UserError(f"{key}: {f'{text!r} {reason}' if text else 'a token must not be empty'}. Remove it.")
            init_ids = encode_description(tokenizer, key, text, texts[text]) if isinstance(texts, dict) else ()
            size, extended = extended.size, extended.with_added_token(text, is_special)
            if extended.size != size + 1:  # the id of the next token is the number of tokens, as in transformers
                index = extended.model.token_to_id(text)
                raise UserError(f"{key}: {text!r} would get id {index}: the token ids have holes. Remove it.")
            added.append(NewToken(size, text, is_special, init_ids))
    return extended, tuple(added)


def encode_description(tokenizer: Tokenizer, key: str, token: str, text: str) -> tuple[int, ...]:
    """Ids of the tokens of a description."""
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError(f"{key}.{token}: {text!r} has no tokens. Describe the token, or list it without a text.")
    return tuple(ids)


def write_new_tokens(folder: Path, tokens: Sequence[NewToken]) -> None:
    """Add tokens to the tokenizer files of a saved checkpoint.

    All added tokens are written to tokenizer.json, in the order of their ids, which other programs derive from it.
    """
    if not tokens:
        return
    known = Tokenizer.open(folder).model.get_added_tokens_decoder()
    entries = {index: describe_token(token) for index, token in known.items()} | {t.id: t.json for t in tokens}
    file = folder / "tokenizer.json"
    content = read_json(file) | {"added_tokens": [{"id": index, **entries[index]} for index in sorted(entries)]}
    write_json(file, content)
    file = folder / "tokenizer_config.json"
    if "added_tokens_decoder" in (config := read_json(file)):
        config["added_tokens_decoder"] = {str(index): entries[index] for index in sorted(entries)}
        write_json(file, config)
    if (file := folder / "added_tokens.json").is_file():
        write_json(file, {str(entries[index]["content"]): index for index in sorted(entries)})


def describe_token(token: AddedToken) -> dict[str, object]:
    """Entry of a token in tokenizer files."""
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return {"content": token.content, **flags, "normalized": token.normalized, "special": token.special}

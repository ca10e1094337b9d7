"""Tokenizer and chat templates of a checkpoint."""

import copy
import functools
import hashlib
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tunekit.data.chat_template.messages import REASONING_KEYS, Messages, Tools
from tunekit.data.chat_template.template import (
    TEMPLATES,
    ChatTemplate,
    compile_template,
    find_template,
    read_template,
    with_defaults,
)
from tunekit.data.token_cache import TokenCache, TokenizerEncoding, compile_alternation
from tunekit.errors import UserError

SIMPLE_KEYS = {"role", "content"}  # the keys of most messages
INCOMPLETE_CHAR = "\ufffd"
MAX_NORMALIZER_GROWTH = 1000  # factor of the length of a text; known tokenizers have up to 3


class TokenizerErrors:
    """Turns the plain `Exception` and the panics that the tokenizers library raises into UserError.

    A context manager, because `except Exception` would also catch all other errors.
    """

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):  # of Rust, a BaseException
            raise UserError(f"{self.problem} ({error}). {self.fix}") from error


ENCODING_ERRORS = TokenizerErrors("the tokenizer fails on a text", "Check the patterns in tokenizer.json.")


class Tokenizer:
    """Tokenizer of a checkpoint, with its special tokens, its chat templates, and the ids that end an answer.

    `model` has no post-processor, truncation and padding; `post_processor` adds BOS and EOS.
    """

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        names: Mapping[str, str],
        templates: Mapping[str, tuple[str, str]],
        stops: frozenset[int] = frozenset(),
        post_processor: Any = None,
    ) -> None:
        self.model, self.names, self.templates = model, dict(names), dict(templates)
        self.template_kwargs: dict[str, Any] = {}  # values of template variables
        self.compiled: dict[str, ChatTemplate] = {}
        self.shapes: dict[Any, Any] = {}  # span patterns of conversations with the same roles and keys
        self.token_cache: TokenCache | None = None  # see `enable_cache`
        self.today: date | None = None
        self.vocab_size: int | None = None  # number of embeddings of the model, if known
        self.max_position_embeddings: int | None = None  # context length of the model, if known
        self.post_processor = post_processor
        self.bos, self.eos, pad = (self.special_token(f"{name}_token") for name in ("bos", "eos", "pad"))
        self.pad: int = next((token for token in (pad, self.eos) if token is not None), 0)
        self.stops = stops | ({self.eos} if self.eos is not None else frozenset())

    @staticmethod
    def open(directory: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint."""
        config = read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # older tokenizers have their special tokens in another file
            config = {**config, **read_json(directory / "special_tokens_map.json")}
        eos_ids = read_json(directory / "generation_config.json").get("eos_token_id")
        eos_ids = eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
        if not all(isinstance(token, int) for token in eos_ids):
            raise UserError(f"{directory / 'generation_config.json'}: eos_token_id must be token ids, got {eos_ids}")
        templates = read_templates(directory, config)
        model, post_processor = read_model(directory)
        return Tokenizer(model, special_token_texts(config), templates, frozenset(eos_ids), post_processor)

    def with_template(self, name: str) -> "Tokenizer":
        """Copy of the tokenizer with a chat template of the package, or of a file."""
        return self.copy_with(templates={"default": (read_template(find_template(name)), name)}, compiled={})

    def with_date(self, today: date) -> "Tokenizer":
        """Copy with a fixed date, for templates that print it: a run resumed on another day renders the same text."""
        return self.copy_with(today=today)

    def with_vocab_size(self, vocab_size: int, path: object, max_positions: int | None = None) -> "Tokenizer":
        """Copy for a model with `vocab_size` embeddings and a context of `max_positions` tokens.

        `path` is the checkpoint, for error messages.
        Added tokens may have higher ids: Gemma 3 has one for images, also in text-only models. `encode` rejects them.
        """
        num_base_tokens = self.model.get_vocab_size(with_added_tokens=False)
        if num_base_tokens > vocab_size:
            raise UserError(
                f"{path}: the tokenizer has {num_base_tokens} tokens, but the model has {vocab_size} embeddings. "
                "Restore the tokenizer.json of this model."
            )
        return self.copy_with(vocab_size=vocab_size, max_position_embeddings=max_positions)

    def with_added_token(self, text: str, is_special: bool) -> "Tokenizer":
        """Copy with another token, which has the next id."""
        model = tokenizers.Tokenizer.from_str(self.model.to_str())
        token = tokenizers.AddedToken(text, special=is_special, normalized=not is_special)
        (model.add_special_tokens if is_special else model.add_tokens)([token])
        return self.copy_with(model=model, token_cache=None)

    def copy_with(self, **fields: Any) -> "Tokenizer":
        """Copy with other fields, and without cached values that depend on them."""
        tokenizer = copy.copy(self)
        vars(tokenizer).update(fields, shapes={})
        for name in ("digest", "size", "special_ids", "special_texts", "stop_texts"):
            vars(tokenizer).pop(name, None)
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, without compiled templates and caches."""
        return {**vars(self), "compiled": {}, "shapes": {}, "token_cache": None}

    def enable_cache(self) -> None:
        """Cache the tokens of words, to encode many texts faster. No effect if it could change a token."""
        with ENCODING_ERRORS:
            self.token_cache = TokenCache.from_model(self.model)

    def special_token(self, name: str) -> int | None:
        """Id of a special token of the tokenizer config, such as `eos_token`; None if it has none."""
        return self.model.token_to_id(self.names[name]) if name in self.names else None

    @cached_property
    def size(self) -> int:
        """Highest token id plus one."""
        return max(self.model.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> dict[int, str]:
        """Texts of special tokens and stop tokens by id: all tokens that can end a turn."""
        added = self.model.get_added_tokens_decoder()
        return {token: item.content for token, item in added.items() if item.special or token in self.stops}

    @cached_property
    def special_texts(self) -> re.Pattern[str]:
        """Pattern of the special tokens and stop tokens."""
        return compile_alternation(self.special_ids.values())

    @cached_property
    def stop_texts(self) -> re.Pattern[str]:
        """Pattern of the stop tokens."""
        return compile_alternation(text for token, text in self.special_ids.items() if token in self.stops)

    @cached_property
    def digest(self) -> str:
        """Hash of all that affects the tokens of a conversation, in hexadecimal digits."""
        prints_date = any("strftime_now" in text for text, _ in self.templates.values())
        day = str(self.today or date.today()) if prints_date else None
        model = self.model.to_str(), None if self.post_processor is None else pickle.dumps(self.post_processor).hex()
        values = [*model, self.names, self.template_texts, sorted(self.stops), self.vocab_size, day]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text. `special` adds the tokens that the tokenizer adds to all texts, such as BOS."""
        ids = self.encode_texts([text], special)[0]
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            token = self.model.id_to_token(max(ids))
            raise UserError(
                f"the text contains the token {token!r} (id {max(ids)}), but the model has {self.vocab_size} embeddings"
            )
        return ids

    def encode_texts(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Token ids of many texts, encoded on all cores. Raises UserError if one of them cannot be encoded as UTF-8."""
        for text in texts:
            check_encodable(text)
        with ENCODING_ERRORS:
            encodings = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
            if special and self.post_processor is not None:
                encodings = [self.post_processor.process(encoding) for encoding in encodings]
            return [encoding.ids for encoding in encodings]

    def encode_with_special(self, texts: Sequence[str], max_length: int) -> tuple[list[int], int]:
        """Token ids of one text or a pair of texts with special tokens, and their number without truncation.

        Texts are truncated before special tokens are added; of a pair, the longer text first, as in transformers.
        """
        for text in texts:
            check_encodable(text)
        with ENCODING_ERRORS:
            encodings = [self.model.encode(text, add_special_tokens=False) for text in texts]
            lengths, post_processor = [len(encoding) for encoding in encodings], self.post_processor
            added = 0 if post_processor is None else post_processor.num_special_tokens_to_add(len(texts) == 2)
            for encoding, limit in zip(encodings, longest_first(lengths, max(max_length - added, 0)), strict=True):
                encoding.truncate(limit)
            if post_processor is not None:
                encodings = [post_processor.process(*encodings)]
            return [token for encoding in encodings for token in encoding.ids], sum(lengths) + added

    def encode_rendered(self, texts: Sequence[str]) -> Sequence[TokenizerEncoding]:
        """Encodings, with character offsets, of rendered conversations. Training and generation both use it."""
        with ENCODING_ERRORS:
            if self.token_cache is not None:
                return self.token_cache.encode(texts)
            return self.model.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids. Special tokens are left out unless `special`."""
        return self.model.decode(list(ids), skip_special_tokens=not special)

    def template(self, tools: Tools = None) -> ChatTemplate:
        """Compiled chat template. With tools, the one named `tool_use` if the checkpoint has it."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = f" named 'default', only {', '.join(self.templates)}" if self.templates else ""
            raise UserError(
                f"the tokenizer has no chat template{names}. Set chat_template (flag --chat-template) to a Jinja file "
                f"or one of {', '.join(TEMPLATES)}; or train on text, or generate with apply_chat_template=false"
            )
        if name not in self.compiled:
            self.compiled[name] = compile_template(*self.templates[name])
        return self.compiled[name]

    @property
    def template_texts(self) -> dict[str, str]:
        """Chat templates by name, with `template_kwargs` as defaults: they render the same text in other programs."""
        return {name: with_defaults(text, self.template_kwargs) for name, (text, _) in self.templates.items()}

    def template_context(self, messages: Messages, tools: Tools = None, prompt: bool = False) -> dict[str, Any]:
        """Variables of a chat template. `prompt` adds the start of an assistant turn at the end."""
        messages = [normalize_message(message) for message in messages]
        today = self.today
        return {
            **({} if today is None else {"strftime_now": lambda fmt: today.strftime(fmt)}),
            **self.template_kwargs,
            **self.names,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def render(self, messages: Messages, tools: Tools = None, prompt: bool = False) -> str:
        """Render a conversation with the chat template."""
        return self.template(tools).render(self.template_context(messages, tools, prompt))

    def encode_prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Token ids of a conversation and the start of the answer. Raises UserError if there are none."""
        ids = self.encode(self.render(messages, tools, prompt=True))
        if not ids:
            raise UserError(f"{self.template(tools).name}: the chat template renders the prompt as an empty text")
        return ids


def check_encodable(text: str) -> None:
    """Raise UserError if a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"the text contains a lone surrogate ({code}), which cannot be tokenized") from None


def longest_first(lengths: Sequence[int], total: int) -> list[int]:
    """Lengths of texts of `lengths` tokens that are truncated to `total` tokens: the longer one first."""
    if sum(lengths) <= total:
        return [*lengths]
    shorter = min(*lengths, total // 2) if len(lengths) == 2 else 0
    is_first = len(lengths) == 2 and lengths[0] <= lengths[1]
    return ([shorter, total - shorter] if is_first else [total - shorter, shorter])[: len(lengths)]


class TextStreamer:
    """Decodes tokens one at a time. Bytes of an incomplete character are held back until it is complete.

    Special tokens are left out unless `special`.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self.tokenizer, self.special, self.ids, self.printed = tokenizer, special, [], 0

    def add(self, token: int) -> str:
        """Add a token, and return the text that it completes, often empty."""
        self.ids.append(token)
        text = self.pending_text()
        if not text or text.endswith(INCOMPLETE_CHAR):
            return ""
        self.mark_printed()
        return text

    def flush(self) -> str:
        """Return the text that is still held back, with incomplete characters."""
        text = self.pending_text()
        self.mark_printed()
        return text

    def mark_printed(self) -> None:
        """Keep only the last printed tokens, as context: a decoder may treat its first token differently."""
        self.ids, self.printed = self.ids[self.printed :], len(self.ids) - self.printed

    def pending_text(self) -> str:
        """Text of the ids that are not printed yet, with incomplete characters."""
        printed = self.tokenizer.decode(self.ids[: self.printed], self.special)
        return self.tokenizer.decode(self.ids, self.special)[len(printed) :]


def normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy with reasoning under the keys that templates read, and without nulls, which templates print as "None".

    A null content is kept: some templates use it to detect tool calls.
    """
    if message.keys() == SIMPLE_KEYS and message["role"] is not None:
        return dict(message)
    fields = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((fields[key] for key in REASONING_KEYS if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def read_json(path: Path) -> dict[str, Any]:
    """JSON object of a file of a checkpoint; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise make_read_error(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content


def make_read_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot read the file: {error}. Download it again.")


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json. Files with the same content are equal."""

    digest: bytes
    path: Path = field(compare=False)


def read_model(directory: Path) -> tuple[tokenizers.Tokenizer, Any]:
    """Read tokenizer.json. Returns a model, which must not be changed, and its post-processor."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{directory}: has no tokenizer.json. Download it, set `tokenizer` to a checkpoint, or create it with "
            "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        file = TokenizerFile(hashlib.sha256(path.read_bytes()).digest(), path)
    except OSError as error:
        raise make_read_error(path, error) from None
    return parse_model(file)


@functools.lru_cache(maxsize=2)  # a run opens one tokenizer, or also that of its teacher, up to ten times
def parse_model(file: TokenizerFile) -> tuple[tokenizers.Tokenizer, Any]:
    """Model without its post-processor, and the post-processor, which may also remove spaces from offsets."""
    content = read_json(file.path)
    if max_growth(content.get("normalizer")) > MAX_NORMALIZER_GROWTH:
        raise UserError(f"{file.path}: the normalizer can make a text more than {MAX_NORMALIZER_GROWTH} times longer")
    with TokenizerErrors(f"{file.path}: is not a valid tokenizer", "Download it again."):
        model = tokenizers.Tokenizer.from_str(json.dumps(content))
    post_processor, model.post_processor = model.post_processor, None
    model.no_truncation()
    model.no_padding()
    return model, post_processor


def max_growth(normalizer: Any) -> int:
    """How many times longer the replacements of a normalizer can make a text: they may follow one another."""
    if not isinstance(normalizer, dict):
        return 1
    steps = normalizer.get("normalizers")
    if isinstance(steps, list):
        return math.prod(map(max_growth, steps))
    content = normalizer.get("content")
    return max(1, len(content)) if isinstance(content, str) else 1


def special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens of a tokenizer config, by key, such as `eos_token`."""
    extra = config.get("extra_special_tokens")
    fields = {**config, **(extra if isinstance(extra, dict) else {})}
    texts = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in fields.items()
    }
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Chat templates by name, each with its file. Template files have precedence over the tokenizer config."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: (read_template(path), str(path)) for name, path in files.items()}
    value, path = config.get("chat_template"), str(directory / "tokenizer_config.json")
    if isinstance(value, list):
        pairs = [(item.get("name"), item.get("template")) for item in value if isinstance(item, dict)]
        return {name: (text, path) for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {"default": (value, path)} if isinstance(value, str) else {}

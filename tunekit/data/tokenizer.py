"""Tokenizer and chat templates of a checkpoint."""

import copy
import hashlib
import json
import pickle
import re
from collections.abc import Mapping, Sequence
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
from tunekit.data.tokenizer_files import ClassHints, TokenizerErrors, has_file, read_json, read_tokenizer
from tunekit.errors import UserError

SIMPLE_KEYS = {"role", "content"}  # the keys of most messages
INCOMPLETE_CHAR = "\ufffd"
# Characters of a text. The tokenizers library takes about 200 bytes per character (0.23), and aborts without memory.
MAX_TEXT_CHARS = 2**24
PROBED_CHARACTERS = 8  # per token of a limit: the start of a text that is encoded first, if the text is longer
PROBE_MARGIN = 1.25  # by which the start must exceed the limit: its last word may have other tokens than in the text


class TextTooLongError(UserError):
    """A text that has more tokens than the limit."""


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
        self.max_tokens: int | None = None  # limit on texts to encode, if any: longer ones are refused early
        self.post_processor = post_processor
        self.class_hints: ClassHints | None = None  # of a saved tokenizer
        self.cleans_up_spaces = False  # whether decoded texts have no spaces before punctuation
        self.bos, self.eos, pad = (self.special_token(f"{name}_token") for name in ("bos", "eos", "pad"))
        self.pad: int = next((token for token in (pad, self.eos) if token is not None), 0)
        self.stops = stops | ({self.eos} if self.eos is not None else frozenset())

    @staticmethod
    def open(directory: Path, model_config: Mapping[str, Any] | None = None) -> "Tokenizer":
        """Read the tokenizer of a checkpoint. `model_config` is its config.json, if it was read before."""
        saved = read_tokenizer(directory, model_config)
        eos_ids = read_json(directory / "generation_config.json").get("eos_token_id")
        eos_ids = eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]
        if not all(isinstance(token, int) for token in eos_ids):
            raise UserError(f"{directory / 'generation_config.json'}: eos_token_id must be token ids, got {eos_ids}")
        templates = read_templates(directory, saved.hints.config)
        tokenizer = Tokenizer(saved.model, saved.names, templates, frozenset(eos_ids), saved.post_processor)
        return tokenizer.copy_with(cleans_up_spaces=saved.cleans_up_spaces, class_hints=saved.hints)

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
        pads = (token for token in (self.pad, self.eos) if token is not None and token < vocab_size)
        return self.copy_with(vocab_size=vocab_size, max_position_embeddings=max_positions, pad=next(pads, 0))

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
        for name in ("digest", "size", "longest_token", "special_ids", "special_texts", "stop_texts"):
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
        if self.max_tokens is not None:
            self.check_length(text, self.max_tokens)
        ids = self.encode_texts([text], special)[0]
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            token = self.model.id_to_token(max(ids))
            raise UserError(
                f"the text contains the token {token!r} (id {max(ids)}), but the model has {self.vocab_size} embeddings"
            )
        return ids

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in bytes, in the alphabet of the vocabulary."""
        return max((len(text.encode()) for text in self.model.get_vocab(with_added_tokens=True)), default=1)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise TextTooLongError for a text that has more tokens, without encoding all of it."""
        size, limit = len(text.encode(errors="surrogatepass")), max_tokens * self.longest_token
        if size > limit:
            problem = f"{size} bytes are more than {max_tokens} tokens of at most {self.longest_token} bytes"
            raise TextTooLongError(f"the prompt is longer than the context: {problem}")
        start = text[: PROBED_CHARACTERS * max_tokens]
        if len(start) < len(text) and len(self.encode_texts([start])[0]) > PROBE_MARGIN * max_tokens:
            raise TextTooLongError(f"the prompt is longer than the context, which has {max_tokens} tokens")

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
        text = self.model.decode(list(ids), skip_special_tokens=not special)
        return clean_up_spaces(text) if self.cleans_up_spaces else text

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


def clean_up_spaces(text: str) -> str:
    """The text without spaces before punctuation and English contractions, which WordPiece decodes as words."""
    for ending in (".", "?", "!", ","):
        text = text.replace(f" {ending}", ending)
    text = text.replace(" ' ", "'")
    for ending in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {ending}", ending)
    return text


def check_encodable(text: str) -> None:
    """Raise UserError if a text cannot be encoded as UTF-8, or is too long to be tokenized."""
    if len(text) > MAX_TEXT_CHARS:
        problem = f"a text of {len(text):,} characters, more than {MAX_TEXT_CHARS:,}"
        raise UserError(f"{problem}. Split it into several rows.")
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


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Chat templates by name, each with its file. Template files have precedence over the tokenizer config."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if has_file(directory / "chat_template.jinja"):
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: (read_template(path), str(path)) for name, path in files.items()}
    value, path = config.get("chat_template"), str(directory / "tokenizer_config.json")
    if isinstance(value, list):
        pairs = [(item.get("name"), item.get("template")) for item in value if isinstance(item, dict)]
        return {name: (text, path) for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    return {"default": (value, path)} if isinstance(value, str) else {}

"""Text to ids and back, as a checkpoint's `tokenizer.json` says."""

import copy
import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tunekit.data.chat_template.template import ChatTemplate
from tunekit.data.token_cache import TokenCache, TokenizerEncoding
from tunekit.errors import UserError

REASONING = ("reasoning_content", "thinking", "reasoning")
PLAIN = {"role", "content"}  # the keys of most messages
UNFINISHED = "\ufffd"


class Tokenizer:
    """A checkpoint's tokenizer: ids, special tokens, the ids that end an answer, and its chat templates by name."""

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        names: Mapping[str, str],
        templates: Mapping[str, tuple[str, str]],
        stops: frozenset[int] = frozenset(),
    ) -> None:
        self.model, self.names, self.templates = model, dict(names), dict(templates)
        self.compiled: dict[str, ChatTemplate] = {}
        self.shapes: dict[Any, Any] = {}  # what was found of conversations, by their shape
        self.pieces: TokenCache | None = None  # encodes rendered texts, once there are many of them
        self.today: date | None = None
        self.vocab: int | None = None  # what the model embeds, once it is known
        # What adds bos and eos is kept apart: some of it also trims the spaces of tokens out of their offsets.
        self.ends, model.post_processor = model.post_processor, None
        model.no_truncation()
        model.no_padding()
        self.bos, self.eos, pad = (self.special_token(f"{name}_token") for name in ("bos", "eos", "pad"))
        self.pad: int = next((token for token in (pad, self.eos) if token is not None), 0)
        self.stops = stops | ({self.eos} if self.eos is not None else frozenset())

    @staticmethod
    def open(folder: Path, template: str | None = None) -> "Tokenizer":
        """Read a checkpoint folder; `template` is the path of a Jinja file to use instead of the checkpoint's own."""
        config = read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # a config that has it is complete; older ones keep names in a file
            config = {**config, **read_json(folder / "special_tokens_map.json")}
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
        stops = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        tokenizer = Tokenizer(read_model(folder), token_names(config), read_templates(folder, config), stops)
        return tokenizer if template is None else tokenizer.with_template(template)

    def with_template(self, path: str) -> "Tokenizer":
        """The same tokenizer with the chat template of a file."""
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; name a Jinja file as `chat_template`") from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"{path}: the chat template cannot be read: {reason}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: the chat template cannot be read: {error}") from None
        return self.copy_with(templates={"default": (text, path)}, compiled={})

    def with_date(self, today: date) -> "Tokenizer":
        """The same tokenizer for templates that print the date: a run that goes on tomorrow renders the same text."""
        return self.copy_with(today=today)

    def with_vocab_size(self, vocab: int, where: object) -> "Tokenizer":
        """The same tokenizer for a model of `vocab` embeddings. `where` is what both were read from.

        Added tokens may lie beyond: Gemma 3 has one for images in models that see none. `encode` does not let them in.
        """
        ordinary = self.model.get_vocab_size(with_added_tokens=False)
        if ordinary > vocab:
            raise UserError(
                f"{where}: its tokenizer knows {ordinary} tokens and its model {vocab}: "
                "the tokenizer is another model's, bring back its own tokenizer.json"
            )
        return self.copy_with(vocab=vocab)

    def copy_with(self, **fields: Any) -> "Tokenizer":
        """A copy with other fields, and without what was found with the old ones."""
        other = copy.copy(self)
        vars(other).update(fields, shapes={})
        vars(other).pop("digest", None)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For another process: templates are compiled again there."""
        return {**vars(self), "compiled": {}, "shapes": {}, "pieces": None}

    def enable_cache(self) -> None:
        """Many texts are to come: remember words, where that cannot change a token."""
        self.pieces = TokenCache.of(self.model)

    def special_token(self, name: str) -> int | None:
        """The id of a token that the tokenizer's config names, such as `eos_token`."""
        return self.model.token_to_id(self.names[name]) if name in self.names else None

    @cached_property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.model.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> dict[int, str]:
        """Special tokens and stops, the tokens that can end a turn: id to text."""
        added = self.model.get_added_tokens_decoder()
        return {token: item.content for token, item in added.items() if item.special or token in self.stops}

    @cached_property
    def special_texts(self) -> re.Pattern[str]:
        """Special tokens and stops in a text."""
        return pattern(self.special_ids.values())

    @cached_property
    def stop_texts(self) -> re.Pattern[str]:
        """Stops in a text."""
        return pattern(text for token, text in self.special_ids.items() if token in self.stops)

    @cached_property
    def digest(self) -> str:
        """Hex of all that decides what a conversation becomes: equal digests, equal tokens."""
        dated = any("strftime_now" in text for text, _ in self.templates.values())
        day = str(self.today or date.today()) if dated else None
        texts = {name: text for name, (text, _) in self.templates.items()}
        model = self.model.to_str(), None if self.ends is None else pickle.dumps(self.ends).hex()
        parts = [*model, self.names, texts, sorted(self.stops), self.vocab, day]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around every text (bos, for many)."""
        ids = self.encode_texts([text], special)[0]
        if self.vocab is not None and max(ids, default=0) >= self.vocab:
            token = self.model.id_to_token(max(ids))
            raise UserError(f"the text holds the token {token!r} ({max(ids)}), but the model knows {self.vocab}")
        return ids

    def encode_texts(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Token ids of many texts at once, on all cores."""
        encodings = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        if special and self.ends is not None:
            encodings = [self.ends.process(encoding) for encoding in encodings]
        return [encoding.ids for encoding in encodings]

    def encode_rendered(self, texts: Sequence[str]) -> Sequence[TokenizerEncoding]:
        """Rendered conversations as tokens that know their characters. Every conversation becomes tokens here."""
        if self.pieces is not None:
            return self.pieces.encode(texts)
        return self.model.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids, special tokens left out unless `special`."""
        return self.model.decode(list(ids), skip_special_tokens=not special)

    def template(self, tools: list[dict[str, Any]] | None = None) -> ChatTemplate:
        """The chat template, compiled: the one for tools if there are tools and the checkpoint has one of its own."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            have = f" (it names only {', '.join(self.templates)})" if self.templates else ""
            raise UserError(
                f"the tokenizer has no chat template{have}; name a Jinja file as `chat_template`, or train on text"
            )
        if name not in self.compiled:
            self.compiled[name] = ChatTemplate(*self.templates[name])
        return self.compiled[name]

    def template_context(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> dict[str, Any]:
        """What a template sees. `prompt` asks for the beginning of an assistant turn at the end."""
        plain = [plain_message(message) for message in messages]
        today = self.today
        return {
            **({} if today is None else {"strftime_now": lambda form: today.strftime(form)}),
            **self.names,
            "messages": plain,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> str:
        """The conversation as the checkpoint's template writes it."""
        return self.template(tools).render(self.template_context(messages, tools, prompt))

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation that the model is to answer."""
        return self.encode(self.render(messages, tools, prompt=True))


class TextStreamer:
    """Ids in, one at a time, printable text out. Bytes of an unfinished character are held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.ids, self.printed = tokenizer, [], 0

    def add(self, token: int) -> str:
        """The text that this token completes, often empty."""
        self.ids.append(token)
        text = self.pending_text()
        if not text or text.endswith(UNFINISHED):
            return ""
        # Tokens printed last are decoded again next time: a decoder may treat the first token of all otherwise.
        self.ids, self.printed = self.ids[self.printed :], len(self.ids) - self.printed
        return text

    def flush(self) -> str:
        """What is held back when no more tokens come."""
        text, self.ids, self.printed = self.pending_text(), [], 0
        return text

    def pending_text(self) -> str:
        """Text of the ids that are not printed yet."""
        return self.tokenizer.decode(self.ids)[len(self.tokenizer.decode(self.ids[: self.printed])) :]


def pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Any of some texts; where one begins with another, the longer one. None of them: nothing."""
    longest = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with reasoning under the names that templates read, and without nulls: templates print them as "None".

    A content that is null stays: some templates know by it that a message calls tools.
    """
    if message.keys() == PLAIN and message["role"] is not None:
        return dict(message)
    fields = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((fields[key] for key in REASONING if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint's file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: unreadable: {error}; fetch the checkpoint's file again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: want a JSON object, this is {type(content).__name__}")
    return content


def read_model(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: no tokenizer.json; fetch the checkpoint's, train with another's (`tokenizer`), or make one: "
            "open the folder with transformers.AutoTokenizer.from_pretrained and call save_pretrained"
        )
    content = read_json(path)
    with TokenizerFileErrors(path):
        return tokenizers.Tokenizer.from_str(json.dumps(content))


class TokenizerFileErrors:
    """The library refuses a file by a plain `Exception`, the parent of all, which no `except` should name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception:
            raise UserError(f"{self.path}: holds no tokenizer ({error}); fetch the checkpoint's file again") from error


def token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens that a tokenizer's config names, by their names (`eos_token`), as text."""
    extra = config.get("extra_special_tokens")
    fields = {**config, **(extra if isinstance(extra, dict) else {})}
    texts = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in fields.items()
    }
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Chat templates by name, each with the file it is from. A file of its own goes before the tokenizer's config."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: (path.read_text(encoding="utf-8"), str(path)) for name, path in files.items()}
    value, name = config.get("chat_template"), str(folder / "tokenizer_config.json")
    if isinstance(value, list):
        return {item["name"]: (item["template"], name) for item in value}
    return {"default": (value, name)} if isinstance(value, str) else {}

"""Tokenizers: the protocol that data needs, a tokenizer of bytes for tests and demos, and the choice by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

Message: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A conversation as tokens.

    Attributes:
        tokens: token ids of the whole conversation.
        learned: for each token, whether the assistant wrote it (its end-of-turn token counts as its own).
    """

    tokens: Sequence[int]
    learned: Sequence[bool]


@runtime_checkable
class Tokenizer(Protocol):
    """What `load_jsonl` needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""

    @property
    def bos_id(self) -> int | None:
        """Token with which every text begins, None if texts begin without one."""

    @property
    def eos_id(self) -> int | None:
        """Token with which a completion ends, None if there is none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone, without bos and eos."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""

    def render_chat(self, messages: Sequence[Message]) -> RenderedChat:
        """Tokens of a conversation, given as messages with `role` and `content`.

        Raises:
            ValueError: the chat template does not accept the conversation.
        """


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, then <bos> 256, <eos> 257 and <pad> 258. Needs no files.

    A conversation is <bos>, then for every message `role: content` and <eos>. Text never encodes to a special token, so
    no content can imitate the end of a turn.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("hé"), tokenizer.decode([104, 195, 169, 257])
        ([104, 195, 169], 'hé')
        >>> chat = tokenizer.render_chat([{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}])
        >>> tokenizer.decode([t for t, learned in zip(chat.tokens, chat.learned) if learned])
        '2'
    """

    @property
    def vocab_size(self) -> int:
        """259."""
        return 259

    @property
    def bos_id(self) -> int:
        """256."""
        return 256

    @property
    def eos_id(self) -> int:
        """257."""
        return 257

    @property
    def pad_id(self) -> int:
        """258."""
        return 258

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of the text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes; special tokens are left out, bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: a token outside [0, 259).
        """
        for i, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} at position {i} is outside [0, {self.vocab_size})")
        return bytes(int(token) for token in tokens if token < 256).decode("utf-8", errors="replace")

    def render_chat(self, messages: Sequence[Message]) -> RenderedChat:
        """<bos>, then `role: content` and <eos> for each message; the assistant's content and <eos> are learned."""
        tokens: list[int] = [self.bos_id]
        learned: list[bool] = [False]
        for message in messages:
            head = self.encode(f"{message['role']}: ")
            body = [*self.encode(message["content"]), self.eos_id]
            tokens += head + body
            learned += [False] * len(head) + [message["role"] == "assistant"] * len(body)
        return RenderedChat(tokens=tokens, learned=learned)


def load_tokenizer(name_or_dir: str) -> Tokenizer:
    """The tokenizer of that name: "tiny" is `ByteTokenizer`, all else goes to transformers' `AutoTokenizer`.

    Args:
        name_or_dir: "tiny", a directory that holds tokenizer files, or a model name on the Hugging Face hub.

    Raises:
        ValueError: no tokenizer can be loaded from there.

    Example:
        >>> load_tokenizer("tiny").vocab_size
        259
    """
    if name_or_dir == "tiny":
        return ByteTokenizer()
    from transformers import AutoTokenizer  # takes seconds, and "tiny" does not need it

    from deltamesh.data.hf_tokenizer import TransformersTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_dir)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer can be loaded from {name_or_dir!r}: {str(error).rstrip('.')}. "
            f"Give 'tiny', a directory with tokenizer.json and tokenizer_config.json, or a model name"
        ) from error
    return TransformersTokenizer(tokenizer)

"""A transformers tokenizer behind the `Tokenizer` protocol, with the assistant's tokens of a rendered chat."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from deltamesh.data.tokenizer import Message, RenderedChat

# The tag by which a template says itself what the assistant wrote; transformers looks for the same.
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TransformersTokenizer:
    """Adapter of a fast transformers tokenizer.

    What the assistant wrote is found in one of two ways. If the chat template has `{% generation %}` tags, they decide.
    Otherwise each assistant message is replaced by a marker and the conversation is rendered again: what differs
    between the two renderings is that message. (Rendering growing prefixes of the conversation is not enough: several
    templates render a turn differently, for instance without its reasoning, once later turns follow.) A token counts if
    it begins inside the message; the special token that ends the turn counts too. What a template puts
    before a message of its own accord (a role, an empty reasoning block) is not learned.

    Args:
        tokenizer: a `PreTrainedTokenizerFast` (slow ones do not report the characters of a token).

    Raises:
        ValueError: the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so it cannot say which characters a token "
                f"covers; use the model's fast tokenizer (tokenizer.json)"
            )
        self.inner = tokenizer
        # A bos token may exist without ever being used (GPT-2), so ask what the tokenizer does rather than what it has.
        first = tokenizer("a")["input_ids"][:1]
        self._bos_id = tokenizer.bos_token_id if first and first[0] == tokenizer.bos_token_id else None
        added = tokenizer.added_tokens_decoder
        self._special_ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.inner)

    @property
    def bos_id(self) -> int | None:
        """Token that the tokenizer puts before a text, None if it puts none."""
        return self._bos_id

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's eos token."""
        eos_id: int | None = self.inner.eos_token_id
        return eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False)
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""
        text: str = self.inner.decode(list(tokens), skip_special_tokens=True)
        return text

    def render_chat(self, messages: Sequence[Message]) -> RenderedChat:
        """Tokens of a conversation by the model's chat template, and which of them the assistant wrote.

        Raises:
            ValueError: there is no chat template, or it does not accept the conversation.
        """
        conversation = [dict(message) for message in messages]
        if _GENERATION_TAG.search(self.inner.get_chat_template()):
            return self._render_by_tags(conversation)
        text = self._render(conversation)
        encoded = self.inner(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], encoded["offset_mapping"]
        learned = [False] * len(tokens)
        for i, message in enumerate(conversation):
            if message["role"] == "assistant":
                self._mark(learned, text, tokens, offsets, self._span(conversation, i, text))
        return RenderedChat(tokens=tokens, learned=learned)

    def _render(self, conversation: list[dict[str, str]]) -> str:
        try:
            text: str = self.inner.apply_chat_template(conversation, tokenize=False)
        except TemplateError as error:
            raise ValueError(f"the chat template does not accept this conversation: {error}") from error
        return text

    def _render_by_tags(self, conversation: list[dict[str, str]]) -> RenderedChat:
        try:
            encoded = self.inner.apply_chat_template(
                conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template does not accept this conversation: {error}") from error
        return RenderedChat(tokens=encoded["input_ids"], learned=[bool(m) for m in encoded["assistant_masks"]])

    def _span(self, conversation: list[dict[str, str]], turn: int, text: str) -> tuple[int, int]:
        """Characters of `text` that message `turn` is responsible for: start, stop."""
        marker = next(c for c in map(chr, range(0xE000, 0xF8FF)) if c not in text)
        changed = [*conversation[:turn], {**conversation[turn], "content": marker}, *conversation[turn + 1 :]]
        other = self._render(changed)
        if marker not in other:
            raise ValueError(f"the chat template leaves out the content of message {turn}; use another template")
        start = _common_start(text, other)
        same_end = _common_start(text[start:][::-1], other[start:][::-1])
        return start, len(text) - same_end

    def _mark(
        self,
        learned: list[bool],
        text: str,
        tokens: Sequence[int],
        offsets: Sequence[tuple[int, int]],
        span: tuple[int, int],
    ) -> None:
        start, stop = span
        after = len(tokens)
        for i, (token_start, token_stop) in enumerate(offsets):
            if token_start >= stop and token_stop > token_start:
                after = i
                break
            if start <= token_start < stop:
                learned[i] = True
        for i in range(after, len(tokens)):  # the turn's end, behind white space that the template may put before it
            if tokens[i] in self._special_ids:
                learned[after : i + 1] = [True] * (i + 1 - after)
                return
            if text[offsets[i][0] : offsets[i][1]].strip():
                return


def _common_start(a: str, b: str) -> int:
    """Number of characters that two strings share at their start."""
    num = min(len(a), len(b))
    differs = np.frombuffer(a[:num].encode("utf-32-le"), dtype="<u4") != np.frombuffer(
        b[:num].encode("utf-32-le"), dtype="<u4"
    )
    return int(differs.argmax()) if differs.any() else num

"""The built-in tiny model: random weights and a byte tokenizer, so that everything runs without a download."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from deltamesh.models.initialize import fill, normal, uniform
from deltamesh.models.qwen3_5 import HybridCausalLM
from deltamesh.models.sharding import ParamSpec


def _draw(spec: ParamSpec, seed: int) -> Tensor:
    name = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if name == "A_log":  # with dt_bias: per-token decays between about 1e-4 and 0.1, so that states are kept for long
        return uniform(spec, seed, 0.02, 0.3).log()
    if name == "dt_bias":
        return uniform(spec, seed, -4.0, -1.0)
    if name == "norm" and ".linear_attn." in spec.name:
        return normal(spec, seed, 0.1, mean=1.0)
    if name == "norm" or name.endswith(("_norm", "layernorm")):
        return normal(spec, seed, 0.1)
    if name == "conv1d":
        return normal(spec, seed, spec.shape[-1] ** -0.5)
    if name == "embed_tokens":
        return normal(spec, seed, 0.5)
    if name in ("out_proj", "o_proj", "down_proj", "in_proj_a", "lm_head"):
        return normal(spec, seed, 0.5 * spec.shape[-1] ** -0.5)
    return normal(spec, seed, spec.shape[-1] ** -0.5)


def random_weights(model: HybridCausalLM, seed: int) -> None:
    """Fills every base parameter with this rank's part of a tensor drawn from (`seed`, full parameter name).

    Drawn in fp32 for the full tensor and then cut, so models of any topology (and, up to rounding, dtype) are equal.

    Example:
        >>> from deltamesh.models import HybridCausalLM, tiny_config
        >>> model = HybridCausalLM(tiny_config())
        >>> random_weights(model, seed=0)
        >>> bool(model.lm_head.weight.isnan().any())
        False
    """
    parameters = dict(model.named_parameters())
    for name, spec in model.base_specs.items():
        fill(parameters[name], _draw(spec, seed), spec, model.tp_rank, model.tp_size)


def random_state(specs: Mapping[str, ParamSpec], seed: int) -> dict[str, Tensor]:
    """The full fp32 tensors that `random_weights` cuts, by name; small models only."""
    return {name: _draw(spec, seed) for name, spec in specs.items()}


class ByteTokenizer:
    """UTF-8 bytes as tokens 0-255, then bos 256, eos 257 and pad 258.

    A chat message is bos, the role, a newline, the content, eos. So the ids of the first messages of a conversation
    are a prefix of the ids of the whole, and conversations that begin alike share their rows.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.decode(tokenizer.encode("naïve"))
        'naïve'
        >>> tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]))
        'user\\nhi'
    """

    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258
    vocab_size = 259

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; with special tokens, bos before and eos after."""
        ids = list(text.encode("utf-8"))
        return [self.bos_token_id, *ids, self.eos_token_id] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """The text; bytes that are no UTF-8 become the replacement character.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        ids = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else list(token_ids)
        names = {self.bos_token_id: b"<bos>", self.eos_token_id: b"<eos>", self.pad_token_id: b"<pad>"}
        out = bytearray()
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the byte vocabulary of {self.vocab_size}")
            if i < 256:
                out.append(i)
            elif not skip_special_tokens:
                out += names[i]
        return out.decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of a conversation; with a generation prompt, ending where the assistant's content begins.

        Raises:
            ValueError: a message without a `role` or a `content` string.
        """
        ids: list[int] = []
        for i, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"message {i} needs 'role' and 'content' strings, got {dict(message)!r}")
            ids += [self.bos_token_id, *self.encode(f"{message['role']}\n{message['content']}"), self.eos_token_id]
        if add_generation_prompt:
            ids += [self.bos_token_id, *self.encode("assistant\n")]
        return ids

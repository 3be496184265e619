"""Data: JSONL and chat formats to token rows, and seeded, resumable batches."""

from deltamesh.data.batches import Batch, BatchSampler, data_digest
from deltamesh.data.errors import DataError
from deltamesh.data.examples import IGNORE_INDEX, Example, Item
from deltamesh.data.jsonl import load_jsonl
from deltamesh.data.tokenizer import ByteTokenizer, Message, RenderedChat, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "BatchSampler",
    "ByteTokenizer",
    "DataError",
    "Example",
    "Item",
    "Message",
    "RenderedChat",
    "Tokenizer",
    "data_digest",
    "load_jsonl",
    "load_tokenizer",
]

"""Converts a chat to tokens and tokens to text: byte-level BPE, with turns between <|im_start|> and <|im_end|>."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

START, END = "<|im_start|>", "<|im_end|>"


class ChatFormat(NamedTuple):
    tokenizer: Any
    start: int
    end: int

    @classmethod
    def of(cls, texts: Sequence[str], merges: Iterable[str], control: Sequence[str]) -> ChatFormat:
        """From the lists of a GGUF file: tokens by number, merges as 'a b', and which tokens are control tokens."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        numbers = {text: number for number, text in enumerate(texts)}
        made = Tokenizer(models.BPE(vocab=numbers, merges=[tuple(pair.split(" ")) for pair in merges]))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
        # User input is text: a '<|im_end|>' in it doesn't end the turn.
        made.encode_special_tokens = True
        return cls(made, numbers[START], numbers[END])

    def turn(self, role: str, content: str) -> list[int]:
        """A whole turn."""
        return [self.start, *self._text(f"{role}\n{content}"), self.end, *self._text("\n")]

    def opening(self, role: str = "assistant") -> list[int]:
        """The beginning of a turn that the model continues."""
        return [self.start, *self._text(f"{role}\n")]

    def closing(self) -> list[int]:
        """What follows the end of a turn."""
        return self._text("\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without control tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

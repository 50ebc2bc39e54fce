"""One token on its own: the text and the bytes it stands for, where a text is told token by token."""

from functools import lru_cache

from dspark_ray.core.types import TokenText
from dspark_ray.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what part of a character decodes to
_SPACE = "\u2581"  # how SentencePiece spells one


class TokenTexts:
    """`texts(token_id)`; remembers what it has been asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of_character = _byte_level_alphabet()
        self._remembered = lru_cache(maxsize=1 << 16)(self._text)

    def __call__(self, token_id: int) -> TokenText:
        return self._remembered(token_id)

    def _text(self, token_id: int) -> TokenText:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        (spelled,) = self._tokenizer.tokens([token_id])
        if _REPLACEMENT in text:
            return TokenText(text, self._raw_bytes(spelled) or text.encode())
        if spelled.startswith(_SPACE) and not text.startswith(" "):
            text = " " + text  # a decoder that strips the space a text begins with
        return TokenText(text, text.encode())

    def _raw_bytes(self, spelled: str) -> bytes | None:
        """Of a token that is part of a character; None where its spelling does not tell."""
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])
        found = [self._byte_of_character.get(character) for character in spelled]
        return bytes(b for b in found if b is not None) if None not in found else None


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling: printable bytes as Latin-1 has them, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(others)}

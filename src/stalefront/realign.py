"""Text made from sampled tokens and encoded again: which of the new tokens are sampled ones, at the same place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Realigned(NamedTuple):
    """Ids of the text, and for each the index of the sampled token with the same id and characters, or −1."""

    ids: list[int]
    kept: list[int]


class Place(NamedTuple):
    """Where a token starts: whole characters of the text before it, and the tokens since then.

    The second is there for the pieces of a character, which all have the same characters before them.
    """

    characters: int
    pieces: tuple[int, ...]


def realign(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, encode: Callable[[str], list[int]] | None = None
) -> Realigned:
    """encode(decode(ids)), aligned with `ids`.

    Two tokens are the same when their ids are, and the characters before them. Pieces of a character that several
    tokens share are the same only when the pieces before them, inside that character, are too.

    Parameters
    ----------
    ids : list of int
        Sampled tokens, special ones included: they are text and are read as special ones again.
    encode : callable or None
        Text to ids. None encodes with `tokenizer` and adds no special tokens.
    """

    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text = decode(ids)
    found = list(tokenizer.encode(text, add_special_tokens=False) if encode is None else encode(text))
    if found == ids:
        return Realigned(found, list(range(len(ids))))
    sampled = {key: index for index, key in enumerate(zip(ids, _places(ids, text, decode), strict=True))}
    kept = [sampled.get(key, -1) for key in zip(found, _places(found, text, decode), strict=True)]
    return Realigned(found, kept)


def _places(ids: list[int], text: str, decode: Callable[[list[int]], str]) -> list[Place]:
    """Place of each token of `text`, from what more and more of the tokens decode to.

    Only the tokens from the last whole character but one on are decoded, so that the time is in proportion to their
    number. Those after the last one would not do: some decoders drop the blank in front of the first token.
    """
    places = []
    characters = start = whole = 0
    shown = before = ""
    for index in range(len(ids)):
        after = decode(ids[start : index + 1])
        more = after[len(shown) :]
        # A piece of a character decodes to a replacement character, which is not what the text has there.
        complete = bool(more) and text.startswith(more, characters)
        # Where the text itself has one, its later pieces show nothing and what follows them starts anew.
        anew = complete and before == shown
        places.append(Place(characters, () if anew else tuple(ids[whole:index])))
        before = after
        if complete:
            characters += len(more)
            start, whole = whole, index + 1
            shown = before = decode(ids[start:whole])
    return places

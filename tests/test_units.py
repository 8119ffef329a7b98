from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localkv.errors import UsageError
from localkv.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    format_bytes,
    format_count,
    parse_int_values,
    parse_size,
    parse_word_values,
    plural,
)

UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
REPOSITORY = Path(__file__).resolve().parents[1]


# -- bytes as text ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (180 * MIB, "180.00 MiB"),
        (22 * GIB + GIB // 2, "22.50 GiB"),
        (5000 * TIB, "5000.00 TiB"),
        (-24 * MIB, "-24.00 MiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_with_a_whole_part(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(-(2**70), 2**70))
def test_the_text_is_within_rounding_of_the_bytes(count: int) -> None:
    number, unit = format_bytes(count).split()
    assert abs(float(number) * UNITS[unit] - count) <= 0.005 * UNITS[unit] + abs(count) * 1e-12


@given(st.integers(0, 1023 * TIB))
@example(MIB - 1)
@example(GIB - 1)
@example(TIB - TIB // 400_000)
def test_rounding_never_writes_1024_of_a_unit(count: int) -> None:
    number, unit = format_bytes(count).split()
    assert float(number) < 1024
    assert unit == "B" or float(number) >= 1


@given(st.integers(-(10**18), 10**18))
def test_counts_only_gain_commas(count: int) -> None:
    assert int(format_count(count).replace(",", "")) == count


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (1, ("slot",), "1 slot"),
        (0, ("slot",), "0 slots"),
        (2, ("KV head",), "2 KV heads"),
        (32768, ("token",), "32,768 tokens"),
        (1, ("entry", "entries"), "1 entry"),
        (3, ("entry", "entries"), "3 entries"),
    ],
)
def test_one_is_not_many(count: int, words: tuple[str, ...], text: str) -> None:
    assert plural(count, *words) == text


# -- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24G", 24 * GIB),
        ("24GiB", 24 * GIB),
        ("24gb", 24 * GIB),
        ("512MB", 512 * MIB),
        (" 1.5 g ", GIB + GIB // 2),
        ("64k", 64 * KIB),
        ("2T", 2 * TIB),
        ("1048576", MIB),
        ("7B", 7),
    ],
)
def test_a_size_takes_every_spelling_of_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "24X", "1e9", "1,5G", "0x10", "1.G", "24 G G", "nan", "9" * 400]
)
def test_what_is_not_a_size_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@given(st.integers(0, 10**18 - 1))
def test_bytes_survive_being_written_and_read(count: int) -> None:
    assert parse_size(str(count)) == count


@given(st.integers(0, 10**18 - 1))
def test_the_text_on_screen_can_be_typed_back(count: int) -> None:
    text = format_bytes(count)
    assert abs(parse_size(text) - count) <= 0.005 * UNITS[text.split()[1]] + 1


# -- value lists -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4096", (4096,)),
        ("1,2", (1, 2)),
        ("1,2,4", (1, 2, 4)),
        ("3-6", (3, 4, 5, 6)),
        ("4096-16384+4096", (4096, 8192, 12288, 16384)),
        ("4096-16383+4096", (4096, 8192, 12288)),
        ("2048-32768*2", (2048, 4096, 8192, 16384, 32768)),
        ("2048-32767*2", (2048, 4096, 8192, 16384)),
        ("1-100*10", (1, 10, 100)),
        ("5-5", (5,)),
        ("5-5*2", (5,)),
        ("0", (0,)),
        ("0-2", (0, 1, 2)),
        ("8, 1-2 ,1", (8, 1, 2)),
        ("4,1-8*2,4", (4, 1, 2, 8)),
    ],
)
def test_value_lists(text: str, values: tuple[int, ...]) -> None:
    assert parse_int_values(text) == values


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("8-2", "2-8"),  # the remedy says how it should have been written
        ("8192-1024*2", "1024-8192"),
        ("1-8+0", "step"),
        ("1-8*1", "multiply"),
        ("1-8*0", "multiply"),
        ("0-8*2", "multiply"),
        ("", "write"),
        ("1,,2", "write"),
        ("1,", "write"),
        ("-1", "write"),
        ("1.5", "write"),
        ("1-2-3", "write"),
        ("1-8*", "write"),
        ("1-8/2", "write"),
        ("4k", "write"),
        ("9" * 5000, "write"),
        ("1-" + "9" * 5000, "write"),
    ],
)
def test_a_bad_value_list_is_refused_with_a_remedy(text: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_int_values(text)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["1-1000000000", "1-1000000000+1", "0-1000000000+3,5", "5,1-999999999999999999"]
)
def test_a_range_of_a_thousand_million_values_costs_nothing(text: str) -> None:
    # In a process with a memory limit: materialising the range would need gigabytes.
    program = (
        "import resource, sys\n"
        "from localkv.errors import UsageError\n"
        "from localkv.units import parse_int_values\n"
        "resource.setrlimit(resource.RLIMIT_AS, (256 << 20,) * 2)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"
        "try:\n    parse_int_values(sys.argv[1])\n"
        "except UsageError as error:\n    print(error)\n"
    )
    pytest.importorskip("resource", reason="process limits are POSIX")
    done = subprocess.run(
        [sys.executable, "-c", program, text],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
    )
    assert "more than 10000 values" in done.stdout, done.stderr


def test_the_largest_list_is_allowed() -> None:
    assert len(parse_int_values("1-10000")) == 10_000
    with pytest.raises(UsageError):
        parse_int_values("0-10000")


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_a_list_of_numbers_survives_being_written_and_read(values: list[int]) -> None:
    assert parse_int_values(",".join(map(str, values))) == tuple(dict.fromkeys(values))


@given(st.integers(0, 10**9), st.integers(0, 500), st.integers(1, 10**6), st.data())
def test_a_step_counts_up_and_never_passes_the_end(
    low: int, count: int, step: int, data: st.DataObject
) -> None:
    high = low + count * step + data.draw(st.integers(0, step - 1))
    assert parse_int_values(f"{low}-{high}+{step}") == tuple(
        low + i * step for i in range(count + 1)
    )


@given(st.integers(1, 10**6), st.integers(2, 50), st.integers(0, 6))
def test_a_factor_multiplies_and_never_passes_the_end(low: int, factor: int, count: int) -> None:
    high = low * factor**count
    expected = tuple(low * factor**i for i in range(count + 1))
    assert parse_int_values(f"{low}-{high}*{factor}") == expected
    assert parse_int_values(f"{low}-{high + low * factor**count - 1}*{factor}") == expected


@given(st.text("0123456789,-+* .x", max_size=24))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        values = parse_int_values(text)
    except UsageError:
        return
    assert values
    assert len(set(values)) == len(values)
    assert all(value >= 0 for value in values)


# -- word lists ------------------------------------------------------------------------------


def test_words_keep_their_order_and_lose_repeats() -> None:
    assert parse_word_values("q8_0, f16,q8_0") == ("q8_0", "f16")


@pytest.mark.parametrize("text", ["", ",", "f16,", "f16,,q8_0", " "])
def test_an_empty_word_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="empty entry"):
        parse_word_values(text)

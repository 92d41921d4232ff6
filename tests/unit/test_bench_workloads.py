"""Workloads: the paper's sizes, one seed one workload, and q changes nothing but what is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.arrivals import AtOnce, Poisson
from bench.dataset import DatasetTokens
from bench.records import PlannedRequest
from bench.tokenizer import VOCAB_SIZE, make_tokenizer
from bench.workloads import WORKLOADS, Lengths, Workload, digest, make_workload, plan
from sgl_hybrid.errors import SettingError

SMALL = Workload(
    num_requests=24,
    num_contexts=3,
    context_tokens=200,
    question=Lengths(20, 1.0, 2, 100),
    output=Lengths(10, 1.0, 1, 64),
    limit_tokens=400,
)


def _common_tokens(left: PlannedRequest, right: PlannedRequest) -> int:
    pairs = zip(left.prompt_ids, right.prompt_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left.prompt_ids), len(right.prompt_ids)))


@pytest.fixture(scope="module")
def paper() -> list[list[PlannedRequest]]:
    return [plan(WORKLOADS["paper"], Poisson(3.0), seed=seed) for seed in (42000, 42001, 42002)]


def test_the_main_workload_has_the_papers_sizes(paper: list[list[PlannedRequest]]) -> None:
    for requests in paper:
        assert len(requests) == 300
        assert {request.context_id for request in requests} == set(range(8))
        assert max(len(r.prompt_ids) + r.output_tokens for r in requests) <= 8192
        assert max(request.output_tokens for request in requests) <= 1024
    lengths = [len(request.prompt_ids) for requests in paper for request in requests]
    outputs = [sum(request.output_tokens for request in requests) for requests in paper]
    assert np.mean(lengths) == pytest.approx(3332, rel=0.02)
    assert np.std(lengths) > 150  # a spread, not a constant
    assert np.mean(outputs) == pytest.approx(72_908, rel=0.08)  # per run of 300


def test_a_fully_shared_context_covers_six_blocks_of_512(paper: list[list[PlannedRequest]]) -> None:
    first, *others = paper[0]
    same = next(request for request in others if request.context_id == first.context_id)
    different = next(request for request in others if request.context_id != first.context_id)
    assert 6 * 512 <= _common_tokens(first, same) < 7 * 512
    assert _common_tokens(first, different) < 8


def test_one_seed_is_one_workload() -> None:
    requests = plan(SMALL, Poisson(3.0), seed=7)
    assert digest(plan(SMALL, Poisson(3.0), seed=7)) == digest(requests)
    assert digest(plan(SMALL, Poisson(3.0), seed=8)) != digest(requests)
    assert digest(plan(SMALL, Poisson(3.1), seed=7)) != digest(requests)  # another plan of times is another workload
    longer = plan(replace(SMALL, num_requests=40), Poisson(3.0), seed=7)
    assert longer[:24] == requests


@pytest.mark.parametrize(("q", "common"), [(0.0, 0), (0.5, 100), (1.0, 200)])
def test_q_is_the_common_fraction_and_changes_nothing_else(q: float, common: int) -> None:
    full = plan(SMALL, AtOnce(), seed=1)
    requests = plan(replace(SMALL, shared_fraction=q), AtOnce(), seed=1)
    for ours, reference in zip(requests, full, strict=True):
        assert len(ours.prompt_ids) == len(reference.prompt_ids)
        assert (ours.context_id, ours.output_tokens, ours.planned_ns) == (
            reference.context_id,
            reference.output_tokens,
            reference.planned_ns,
        )
        assert ours.prompt_ids[:common] == reference.prompt_ids[:common]
        assert ours.prompt_ids[200:] == reference.prompt_ids[200:]  # the question
        assert ours.common_tokens == common
    sharers = [request for request in requests if request.context_id == requests[0].context_id]
    assert common <= _common_tokens(sharers[0], sharers[1]) < common + 8


def test_isolation_gives_every_request_a_stable_salt_of_its_own() -> None:
    isolated = plan(SMALL, AtOnce(), seed=1, isolate=True)
    salts = [request.salt for request in isolated]
    assert None not in salts
    assert len(set(salts)) == len(salts)
    assert [
        request.salt for request in plan(replace(SMALL, shared_fraction=0.5), Poisson(9), seed=1, isolate=True)
    ] == salts
    assert {request.salt for request in plan(SMALL, AtOnce(), seed=1)} == {None}


def test_special_tokens_are_never_drawn(paper: list[list[PlannedRequest]]) -> None:
    ids = np.concatenate([request.prompt_ids for request in paper[0]])
    assert (ids.min(), ids.max()) == (4, VOCAB_SIZE - 1)


def test_a_prompt_too_long_for_the_limit_is_cut_and_its_output_still_fits() -> None:
    tight = Workload(
        context_tokens=90, question=Lengths(50, 0.1, 2, 80), output=Lengths(40, 0.1, 1, 64), limit_tokens=100
    )
    for request in plan(tight, AtOnce(), seed=0):
        assert len(request.prompt_ids) + request.output_tokens <= 100
        assert request.output_tokens >= 1


def test_scale_shrinks_every_length() -> None:
    requests = plan(make_workload("paper", scale=0.25), AtOnce(), seed=0)
    assert np.mean([len(request.prompt_ids) for request in requests]) == pytest.approx(3332 / 4, rel=0.03)
    assert max(request.output_tokens for request in requests) <= 256
    assert make_workload("paper", scale=0.25).limit_tokens == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_fraction": 1.5}, "expected a common-prefix fraction q of 0 to 1, got 1.5"),
        ({"num_requests": 0}, "expected at least 1 request, got 0"),
        ({"num_contexts": 0}, "expected at least 1 shared context, got 0"),
        ({"vocab_tokens": 4}, "expected a vocabulary above 4 tokens, got 4"),
        ({"scale": 0.0}, "expected a scale above 0 and up to 1, got 0.0"),
        ({"scale": 2.0}, "expected a scale above 0 and up to 1, got 2.0"),
    ],
)
def test_bad_settings_say_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_workload("paper", **changes)


def test_unknown_name_and_negative_seed() -> None:
    with pytest.raises(SettingError, match="expected a workload out of paper, probe, smoke, got 'q1'"):
        make_workload("q1")
    with pytest.raises(SettingError, match="expected a seed of at least 0, got -1"):
        plan(SMALL, AtOnce(), seed=-1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _conversation(
    number: int, *, question: str = "what is in box", answer: str = "there is something in box"
) -> dict[str, Any]:
    turns = [
        {"from": "human", "value": f"{question} {number}"},
        {"from": "gpt", "value": f"{answer} {number} " * (number % 5 + 1)},
    ]
    return {"id": str(number), "conversations": turns}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("dataset") / "sharegpt.json"
    unusable = [
        {"id": "empty", "conversations": []},
        {"id": "one", "conversations": [{"from": "human", "value": "hello there, is anyone here"}]},
        {
            "id": "gpt first",
            "conversations": [{"from": "gpt", "value": "hello there"}, {"from": "human", "value": "hi"}],
        },
        {"id": "short", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    file.write_text(json.dumps(unusable + [_conversation(number) for number in range(40)]))
    return file


def test_a_conversation_file_gives_questions_targets_and_contexts(dataset: Path, model_folder: Path) -> None:
    def planned(seed: int, q: float = 1.0) -> list[PlannedRequest]:
        workload = replace(SMALL, shared_fraction=q)
        return plan(workload, AtOnce(), seed=seed, tokens=DatasetTokens(workload, seed, dataset, model_folder))

    tokenizer, requests = make_tokenizer(), planned(3)
    assert digest(planned(3)) == digest(requests)
    assert digest(planned(4)) != digest(requests)
    questions = [tokenizer.decode(request.prompt_ids[200:]) for request in requests]
    assert all(question.startswith("what is in box ") for question in questions)
    assert len(set(questions)) == len(requests)
    for request, question in zip(requests, questions, strict=True):
        number = int(question.split()[-1])
        answer = _conversation(number)["conversations"][1]["value"]
        assert request.output_tokens == min(64, len(tokenizer.encode(answer).ids))
    half = planned(3, q=0.5)
    assert [request.prompt_ids[:100] for request in half] == [request.prompt_ids[:100] for request in requests]
    assert [request.prompt_ids[200:] for request in half] == [request.prompt_ids[200:] for request in requests]
    assert [request.prompt_ids[100:200] for request in half] != [request.prompt_ids[100:200] for request in requests]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "expected a JSON list of conversations"),
        ('{"conversations": []}', "expected a JSON list of conversations"),
        ('[{"conversations": [{"from": "human"}]}]', "expected a JSON list of conversations"),
        ("[]", "expected at least 24 usable conversations"),
    ],
)
def test_a_malformed_dataset_is_named(content: str, message: str, tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(SettingError, match=message):
        DatasetTokens(SMALL, 0, file, model_folder)


def test_missing_dataset_and_missing_tokenizer_are_named(dataset: Path, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"expected a dataset file, got .*absent\.json: No such file"):
        DatasetTokens(SMALL, 0, tmp_path / "absent.json", model_folder)
    with pytest.raises(SettingError, match=r"expected a model folder with a tokenizer\.json"):
        DatasetTokens(SMALL, 0, dataset, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingError, match="expected a readable tokenizer"):
        DatasetTokens(SMALL, 0, dataset, tmp_path)

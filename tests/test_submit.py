"""The course's six files, byte for byte, from small files in the course's own layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minbert.delivery.predictor import Predictor
from minbert.delivery.submit import Submitted, submit
from minbert.errors import MinbertError
from minbert.model.answers import Decision
from tests.models import THREE, make

# As the course has them: tabs, a first column without a name, texts with a space before them, quoted quotes.
COURSE = {
    "ids-sst-dev.csv": "\tid\tsentence\tsentiment\n0\ta7d575\t The sun came out .\t3\n1\t33cfa3\t a nice bonus\t2\n",
    "ids-sst-test-student.csv": "0\t\tid\tsentence\n1\t0.0\tb75737\t nice\n2\t1.0\td17a87\t the sun\n",
    "quora-dev.csv": (
        "\tid\tsentence1\tsentence2\tis_duplicate\n"
        "290564\tfbfddc\tHow do I get better at chess?\tWhy won't my printer connect?\t0.0\n"
        '318737\t318658\t"""nice"" is nice"\tnice\t1.0\n'
    ),
    "quora-test-student.csv": "\tid\tsentence1\tsentence2\n7\tc0ffee\tnice\tthe sun\n",
    "sts-dev.csv": "\tid\tsentence1\tsentence2\tsimilarity\n5739\t876d01\tThe sun\tthe lake\t1.0\n",
    "sts-test-student.csv": "\tid\tsentence1\tsentence2\n735\tcce9b5\tA frog.\tA small frog.\n2259\t443c1c\tnice\tnice\n",
}
SIX = [f"{task}-{split}-output.csv" for task in ("sst", "para", "sts") for split in ("dev", "test")]


def predictor_for(encoder: Path, tasks: dict[str, dict[str, Any]] = THREE) -> Predictor:
    tokenizer, model, manifest = make(encoder, tasks)
    return Predictor(model, tokenizer, manifest)


@pytest.fixture(scope="module")
def predictor(tiny_encoder: Path) -> Predictor:
    return predictor_for(tiny_encoder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in COURSE.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(MinbertError) as caught:
        call()
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the format -----------------------------------------------------------------------------------------------------


def test_six_files_with_the_courses_names(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    found = list(submit(predictor, data, tmp_path / "predictions"))
    assert [one.path for one in found] == [tmp_path / "predictions" / name for name in SIX]
    assert [one.rows for one in found] == [2, 2, 2, 1, 1, 2]
    assert not any(one.missing or one.skipped for one in found)
    assert names(tmp_path / "predictions") == sorted(SIX)


def test_the_folder_is_predictions_where_one_stands(
    predictor: Predictor, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    list(submit(predictor, data))
    assert names(tmp_path / "predictions") == sorted(SIX)


def test_sentiment_byte_for_byte(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    list(submit(predictor, data, tmp_path))
    first, second = (
        int(value) for value in predictor.answers(["The sun came out .", "a nice bonus"])["sst"].predictions
    )
    assert (tmp_path / "sst-dev-output.csv").read_bytes() == (
        f"id \t Predicted_Sentiment \na7d575 , {first} \n33cfa3 , {second} \n".encode()
    )
    third, fourth = (int(value) for value in predictor.answers(["nice", "the sun"])["sst"].predictions)
    assert (tmp_path / "sst-test-output.csv").read_bytes() == (
        f"id \t Predicted_Sentiment \nb75737 , {third} \nd17a87 , {fourth} \n".encode()
    )


def test_paraphrase_byte_for_byte(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    list(submit(predictor, data, tmp_path))
    answers = predictor.answers(
        ["How do I get better at chess?", '"nice" is nice'], ["Why won't my printer connect?", "nice"], ["quora"]
    )["quora"]
    first, second = ("1.0" if value else "0.0" for value in answers.predictions)
    assert (tmp_path / "para-dev-output.csv").read_bytes() == (
        f"id \t Predicted_Is_Paraphrase \nfbfddc , {first} \n318658 , {second} \n".encode()
    )


def test_similarity_byte_for_byte(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    """Spelt as the course spells it."""
    list(submit(predictor, data, tmp_path))
    first, second = predictor.answers(["A frog.", "nice"], ["A small frog.", "nice"], ["sts"])["sts"].predictions
    assert (tmp_path / "sts-test-output.csv").read_bytes() == (
        f"id \t Predicted_Similiary \ncce9b5 , {float(first)} \n443c1c , {float(second)} \n".encode()
    )


def test_the_course_reads_them_back(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    """Its own scoring splits a row at " , "."""
    list(submit(predictor, data, tmp_path))
    for name in SIX:
        header, *rows = (tmp_path / name).read_text(encoding="utf-8").split("\n")[:-1]
        assert header.split("\t")[0] == "id "
        for row in rows:
            identifier, value = row.split(" , ")
            assert identifier == identifier.strip()
            assert float(value) >= 0


def test_decisions_of_dev_count(tiny_encoder: Path, data: Path, tmp_path: Path) -> None:
    tokenizer, model, manifest = make(tiny_encoder)
    for threshold, value in ((0.0, "1.0"), (1.0, "0.0")):
        decided = replace(manifest, decisions={"quora": Decision(threshold=threshold)})
        list(submit(Predictor(model, tokenizer, decided), data, tmp_path))
        rows = (tmp_path / "para-dev-output.csv").read_text().splitlines()[1:]
        assert rows == [f"fbfddc , {value} ", f"318658 , {value} "]


# --- what is missing ------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named_and_the_others_written(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    (data / "quora-test-student.csv").unlink()
    (data / "sts-dev.csv").unlink()
    found = {one.path.name: one for one in submit(predictor, data, tmp_path / "out")}
    assert "quora-test-student.csv" in found["para-test-output.csv"].missing
    assert "sts-dev.csv" in found["sts-dev-output.csv"].missing
    assert [name for name, one in found.items() if not one.missing] == [
        "sst-dev-output.csv",
        "sst-test-output.csv",
        "para-dev-output.csv",
        "sts-test-output.csv",
    ]
    assert names(tmp_path / "out") == sorted(name for name, one in found.items() if not one.missing)


def test_the_courses_files_may_lie_in_a_folder_of_their_own(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    data.rename(tmp_path / "cs224n")
    assert not any(one.missing for one in submit(predictor, tmp_path, tmp_path / "out"))


@pytest.mark.parametrize(
    ("tasks", "written"),
    [
        ({"sst": {}}, SIX[:2]),
        ({"sts": {}, "sst": {}}, SIX[:2] + SIX[4:]),
        ({"quora": {}, "cfimdb": {}}, SIX[2:4]),
    ],
)
def test_a_model_with_fewer_tasks(
    tiny_encoder: Path, data: Path, tmp_path: Path, tasks: dict[str, dict[str, Any]], written: list[str]
) -> None:
    found = list(submit(predictor_for(tiny_encoder, tasks), data, tmp_path / "out"))
    assert [one.path.name for one in found] == written
    assert names(tmp_path / "out") == sorted(written)


def test_a_model_with_none_of_the_tasks(tiny_encoder: Path, data: Path, tmp_path: Path) -> None:
    other = predictor_for(tiny_encoder, {"cfimdb": {}})
    message = refusal(lambda: list(submit(other, data, tmp_path / "out")))
    assert message == "this model has none of sst, quora, sts; it has: cfimdb"
    assert not (tmp_path / "out").exists()


def test_a_task_without_test_files_of_its_own_takes_the_courses(
    tiny_encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as the task learnt to read: `normalise` stays."""
    quiet = predictor_for(tiny_encoder, {"sst": {"test": [], "normalise": True}})
    given: list[list[str]] = []
    answers = Predictor.answers
    monkeypatch.setattr(
        Predictor, "answers", lambda self, texts, *rest: (given.append(texts), answers(self, texts, *rest))[1]
    )
    (data / "ids-sst-test-student.csv").write_text("0\t\tid\tsentence\n1\t0.0\tb75737\t It's NICE.\n")
    _, test = submit(quiet, data, tmp_path / "out")
    assert test == Submitted(tmp_path / "out" / "sst-test-output.csv", rows=1)
    assert given[1] == ["it 's nice ."]


def test_rows_without_a_text_are_counted(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    path = data / "ids-sst-test-student.csv"
    path.write_text(COURSE[path.name] + "3\t2.0\te00000\t \n", encoding="utf-8")
    found = {one.path.name: one for one in submit(predictor, data, tmp_path / "out")}
    assert (found["sst-test-output.csv"].rows, found["sst-test-output.csv"].skipped) == (2, 1)


def test_a_file_that_is_wrong_stops_and_is_named(predictor: Predictor, data: Path, tmp_path: Path) -> None:
    (data / "sts-dev.csv").write_text("\tid\tsentence1\tsentence2\tsimilarity\n0\ta\tnice\tnice\t9.0\n")
    message = refusal(lambda: list(submit(predictor, data, tmp_path / "out")))
    assert 'sts-dev.csv:2: similarity is "9.0"; expected a number from 0 to 5' in message
    assert names(tmp_path / "out") == sorted(SIX[:4])

"""Facts hidden in texts, questions about them, and how answers of two caches are compared."""

import re

import pytest

from turboquant.integration import quality_report, retrieval
from turboquant.integration.quality import KEY_TOKENS, same_tokens


class Letters:
    """A tokenizer of characters, with a BOS of 0."""

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def batch_decode(self, rows):
        return ["".join(map(chr, row)) for row in rows]


def quiz_of(length=8000, count=3, seed=1):
    return retrieval.make_quiz(Letters(), Letters().encode("x" * 9000), length, count, seed)


def test_facts_lead_to_every_answer():
    quiz = quiz_of()
    text = "".join(map(chr, quiz.text[1:]))
    assert quiz.text[0] == 0 and 0 not in quiz.text[1:]
    numbers = dict(re.findall(r"The number of the (\w+ \w+) is (\d{5})\.", text))
    referred = dict(re.findall(r"The (\w+ \w+) has the same number as the (\w+ \w+)\.", text))
    assert len(numbers) == 6 and len(referred) == 3  # three of the numbers are nobody's answer
    for question in quiz.questions:
        assert question.prompt[: len(quiz.text)] == quiz.text
        assert len(question.prompt) + retrieval.ANSWER_TOKENS <= 8000
        (name,) = re.findall(r"What is the number of the (\w+ \w+)\?", "".join(map(chr, question.prompt)))
        assert question.answer == (numbers[name] if question.hops == 1 else numbers[referred[name]])
    assert [question.hops for question in quiz.questions] == [1, 1, 1, 2, 2, 2]


def test_facts_are_spread_over_the_text():
    text = "".join(map(chr, quiz_of().text))
    places = [match.start() / len(text) for match in re.finditer(r"\nThe ", text)]
    assert len(places) == 9 and places == pytest.approx([(i + 1) / 9.6 for i in range(9)], abs=0.07)


def test_seeds_give_other_questions():
    assert quiz_of(seed=1) == quiz_of(seed=1) != quiz_of(seed=2)


@pytest.mark.parametrize("length", [500, 12000])
def test_texts_without_room_or_filler_are_refused(length):
    with pytest.raises(ValueError, match=f"length={length} leaves"):
        quiz_of(length)


def test_score_of_answers():
    questions = [retrieval.Question([], str(answer), hops) for answer, hops in ((111, 1), (222, 1), (333, 2), (444, 2))]
    said = [" 111.", " 221", "it is 333, not 1", "no idea"]
    found = retrieval.score(questions, said, [" 111.", " 222", " 444", " 444"])
    assert found == {
        "questions": 4, "same_answers": 0.25, "retrieved": 0.5, "retrieved_native": 1.0,
        "retrieved_two_hops": 0.5, "retrieved_two_hops_native": 0.5,
    }  # fmt: skip


def test_same_tokens():
    found = same_tokens([[1, 2, 3, 4], [9, 9, 9, 9]], [[1, 2, 8, 4], [9, 9, 9, 9]])
    assert found == {"generated": 4, "same_tokens": 3.0, "same_texts": 0.5}


def make_materials(generate, questions):
    sources = [" ".join(map(str, range(start, start + 4000))) for start in (0, 5000)]
    plan = quality_report.Plan(["k4v4"], [1200, 2000], 2, 50, generate, questions, sources, "float32", {}, {}, 1)
    return plan.materials(Letters())


def test_engines_are_asked_for_what_is_compared():
    """Calls in the order in which what they bring is taken apart again."""
    materials = make_materials(7, 2)
    case = materials.case("k4v4", "model", "out.pt")
    assert [(len(prompts), count) for prompts, count in case.free] == [(4, 7), (1, 1), (4, 10), (1, 1), (4, 10)]
    assert case.max_model_len == 2001  # of no call more than of the longest text
    assert all(
        prompt[:KEY_TOKENS] != text[:KEY_TOKENS] for text, prompt in zip(case.texts, case.free[0][0], strict=True)
    )
    right = [[ord(letter) for letter in question.answer] for question in materials.quizzes[1].questions]
    native = [[[5] * 7] * 4, [[1]], [[5]] * 4, [[1]], right]
    said = [[[5] * 7] * 3 + [[5] * 6 + [6]], [[1]], [[5]] * 4, [[1]], [*right[:3], [ord("7")]]]
    assert materials.compare_said(0, said, native)["same_tokens"] == 7
    found = materials.compare_said(1, said, native)
    assert found["same_tokens"] == 6.5 and found["retrieved"] == 1 and found["retrieved_two_hops"] == 0.5
    assert "right answers 100% (native 100%), over two hops 50% (100%)" in quality_report.answers(found)


def test_nothing_more_is_asked_by_default():
    materials = make_materials(0, 0)
    assert materials.case("k4v4", "model", "out.pt").free == []
    assert materials.compare_said(0, [], []) == {} and quality_report.answers({}) == ""


def test_questions_without_continuations():
    materials = make_materials(0, 1)
    said = [[[1]], [[49], [50]], [[1]], [[51], [52]]]
    assert materials.compare_said(1, said, said)["same_answers"] == 1

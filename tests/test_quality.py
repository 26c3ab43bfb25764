"""`benchmark.py quality`: what is forced, recorded and compared."""

import math
from pathlib import Path

import pytest
import torch

from turboquant.integration import quality


def test_recorder_forces_the_texts_and_keeps_the_last_word_of_a_chunked_prompt():
    texts = [[100 * t + i for i in range(30)] for t in (1, 2)]
    recorder = quality.Recorder(texts)
    starts = [tuple(text[: quality.KEY_TOKENS]) for text in texts]
    logits = torch.randn(2, 50)
    assert recorder.step(starts[:1], [28], torch.full((1, 50), 7.0)) == [128]  # a chunk that does not end the prompt
    assert recorder.step(starts, [28, 28], logits) == [128, 228]
    assert recorder.step(starts[::-1], [29, 29], logits) == [229, 129]
    found = recorder.result()
    expected = logits.log_softmax(-1)
    torch.testing.assert_close(found, expected[[0, 1, 1, 0]])  # text 0 at 28 and 29, then text 1


def test_comparison_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    found = quality.compare(p, q, torch.tensor([0, 1]))
    kld = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found["mean_kld"] == pytest.approx(kld / 2) and found["scored"] == 2
    assert found["top1"] == 0.5
    assert found["ppl_ratio"] == pytest.approx(math.exp(math.log(2) / 2))


def test_equal_engines_have_no_distance():
    p = torch.randn(700, 90).log_softmax(-1)
    found = quality.compare(p, p.clone(), torch.randint(90, (700,)))
    assert found["mean_kld"] == 0 and found["top1"] == 1 and found["ppl_ratio"] == 1 and found["scored"] == 700


def test_size_counts_the_exact_window():
    stats = {"bytes_per_token": 272, "exact_tokens": 128}
    found = quality.size(stats, 1024, 1024)
    assert found["bits_per_element"] == 4.25 and found["bits_with_window"] == pytest.approx(4.25 + 2)
    assert quality.size(stats, 1024, 64)["smaller_than_bf16"] < 1  # all of a short context is exact


def test_contenders_bring_their_own_options():
    case = quality.Case(
        "k4v4+buffer_size=64+calibration=none", "m", [list(range(40))], 10, "o", options={"buffer_size": 0, "seed": 3}
    )
    assert case.preset == "k4v4" and case.all_options == {"buffer_size": 64, "calibration": "none", "seed": 3}
    assert quality.Case("turboquant_4bit_nc", "m", [list(range(40))], 10, "o").preset is None


def test_texts_are_prose_and_code_by_turns():
    class Words:
        def encode(self, text):
            return text.split()

    found = quality.texts(Words(), [50], 4)
    assert [len(text) for text in found] == [50] * 4 and len({tuple(text) for text in found}) == 4
    assert found[1] == Path(quality.CODE[0].__file__).read_text().split()[:50] and found[0] != found[2]
    with pytest.raises(ValueError, match="more than there are"):
        quality.texts(Words(), [50, 10**6], 2)
    lengths = [len(text) for text in quality.texts(Words(), [50, 60], 2)]
    assert lengths == [50, 50, 60, 60]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"contender": "k4v5"}, "did you mean 'k4v4'"),
        ({"contender": "fp8+buffer_size=3"}, "unknown contender"),
        ({"contender": "k4v4+bufer_size=3"}, "did you mean 'buffer_size'"),
        ({"forced": 0}, "must be positive"),
        ({"forced": 37}, f"leave {quality.KEY_TOKENS} tokens of every text"),
        ({"free": [([list(range(30))], 3)]}, f"a free prompt starts with the {quality.KEY_TOKENS} tokens"),
        ({"texts": [list(range(40)), list(range(40))]}, "start with the same"),
    ],
)
def test_cases_that_cannot_be_run(changed, said):
    given = {"contender": "k4v4", "model": "m", "texts": [list(range(40))], "forced": 10, "output": "o"}
    assert quality.Case(**given).forced_tokens().tolist() == list(range(30, 40))
    with pytest.raises(ValueError, match=said):
        quality.Case(**given | changed)

from dataclasses import replace

from kvferry.messages import Sampling
from router.refused import REFUSED_S, Refused
from router.request import GenerationRequest

REQUEST = GenerationRequest((1, 2, 3), Sampling(1, 8))


def test_a_fingerprint_is_refused_for_ten_minutes_whatever_its_seed():
    refused = Refused()
    assert refused.left_s(REQUEST, 0.0) == 0
    refused.add(REQUEST, 0.0)
    again = replace(REQUEST, sampling=replace(REQUEST.sampling, seed=77), priority=3)
    assert refused.left_s(again, 10.0) == REFUSED_S - 10
    assert refused.left_s(again, REFUSED_S) == 0
    assert refused.left_s(replace(REQUEST, prompt_tokens=(1, 2)), 10.0) == 0
    assert refused.left_s(replace(REQUEST, sampling=replace(REQUEST.sampling, min_tokens=2)), 10.0) == 0

"""What the times of deployment leave out."""

import timm
import torch

import lipsformer
from benchmarks.deployment import time_rounds


def test_only_calls_that_repeat_a_recording_are_timed(monkeypatch):
    model = timm.create_model("lipsformer_swin_nano").eval()
    folded = lipsformer.optimize_for_inference(model)
    modules_ran: list[bool] = []
    forward = type(folded).forward

    def noted(self, x):
        modules_ran[-1] = True
        return forward(self, x)

    monkeypatch.setattr(type(folded), "forward", noted)

    def logits(images):
        modules_ran.append(False)
        with torch.no_grad():
            return folded(images)

    way = ("lipsformer_swin_nano", "folded", "fp32")
    seconds = time_rounds({way: logits}, torch.randn(2, 3, 32, 32), rounds=3)
    assert len(seconds[way]) == 3
    assert modules_ran[-3:] == [False, False, False] and sum(modules_ran) == len(modules_ran) - 3

"""The example in README runs as it is printed, and its second pass is warm."""

import pathlib
import re

import numpy as np

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:  # the point of the test
        exec(block, names)
    assert names["result"].status == "finished" and names["result"].reused_length == 64
    assert names["lease"].resumable_length == 64
    model = names["model"]
    cache = model.init_cache(batch=1, capacity=256)
    cold, _ = model.prefill(names["params"], names["tokens"], cache, logits="last")
    assert np.array_equal(names["logits"], cold)

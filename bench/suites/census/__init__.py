"""The pass on a census of real models: what it rewrites, what it leaves and why, and what it costs.

    python -m bench census export --census FOLDER --out export.jsonl        exported programs, decomposed and not
    python -m bench census sdpa --census FOLDER --out sdpa.jsonl            models that call SDPA, under torch.compile
    python -m bench census summary export.jsonl                             tables of either

FOLDER is a census: `zoo.py` builds models by name with random weights, `census.py` counts attention sites in graphs and
compares outputs, `models.txt` names the models to use. None of it is part of this package.
"""

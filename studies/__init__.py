"""Reproductions of the report's figures and ablations of the algorithm, run from a checkout.

`python -m studies` lists them; `python -m studies.NAME --out DIR` runs one and writes NAME.json and NAME.svg.
"""

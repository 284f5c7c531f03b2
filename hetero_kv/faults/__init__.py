"""Faults put to cached state on purpose, and the checks that must find them.

`kinds` says what can go wrong with which contract, when, and which check stands guard; `forge` and
`places` do it in tiers and rows, `resident` in device pages and slots; `checks` switches one check
off; `trial` serves a request under a fault, `residence` lets a resident row go on under one.
"""
